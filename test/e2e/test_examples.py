"""The examples end with one graph and eager's numbers. One of them by default; all if asked for.

DYNAMO_DIST_ALL_EXAMPLES=1 pytest test/e2e/test_examples.py    # some ten minutes
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tools" / "examples"
RANKS = {"experts": 2, "llama": 2, "megatron": 2, "replicate": 2, "titan": 4}
SAMPLE = ("megatron",)  # experts, llama: tests of routing and the demo show what these do


def test_no_example_is_left_out():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RANKS, "shown"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_an_example(torchrun, name):
    if name not in SAMPLE and "DYNAMO_DIST_ALL_EXAMPLES" not in os.environ:
        pytest.skip("DYNAMO_DIST_ALL_EXAMPLES=1 runs this one too")
    if name == "llama":
        pytest.importorskip("transformers", reason="needs pip install dynamo-dist[demo]")
    said = torchrun(FOLDER / f"{name}.py", RANKS[name], timeout=1200).stdout
    assert " 0 graph breaks, exposed " in said
    assert said.count(": equal") == 1
    assert "DIFFERENT" not in said
