"""The fuzzer of cut graphs: clean programs pass, and each planted fault is found."""

import json
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]


def fuzz(*arguments):
    done = forked.run_script(ROOT / "tools" / "fuzz_split.py", *arguments, cwd=ROOT, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (1 if found["failed"] else 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--floats",)], ids=["exact", "floats"])
def test_programs_in_parts_have_the_numbers(more):
    found = fuzz("--programs", "30", *more)
    assert found["failures"] == []
    assert found["cut"] > 10 and found["launches_cut"] > 30
    assert found["in_several_regions"] > 2


@pytest.mark.slow
@pytest.mark.sweep  # on ranks, test_split.py trains in parts
def test_joint_graphs_in_parts_train_as_whole_ones():
    found = fuzz("--programs", "16", "--joint")
    assert found["failures"] == [] and found["cut"] > 4 and found["in_several_regions"] > 1


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["joins", "sums", "gathers", "orders", "counts"])
def test_a_planted_fault_is_found(fault):
    assert fuzz("--programs", "16", "--plant", fault)["failed"] > 0
