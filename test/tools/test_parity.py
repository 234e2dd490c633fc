"""Upstream beside ours: verdicts, programs that hang or die, records that add up, and the quick
part itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

from comparison.keeping import Kept, add_figures  # noqa: E402
from comparison.outcome import End, compare, judge, numbers  # noqa: E402
from comparison.parts import PARTS  # noqa: E402

RIGHT, WRONG, ERROR = End("right"), End("wrong", "off"), End("error", "refused")
HANG, CRASH, UNFIT = End("hang"), End("crash"), End("unfit")


@pytest.mark.parametrize(
    ("upstream", "ours", "verdict"),
    [
        (RIGHT, RIGHT, "same"),
        (RIGHT, ERROR, "lost"),
        (RIGHT, HANG, "lost"),
        (RIGHT, CRASH, "lost"),
        (RIGHT, WRONG, "wrong"),
        (RIGHT, UNFIT, "lost"),
        # Where upstream refuses, to compute something else or to hang is worse than to refuse.
        (ERROR, WRONG, "wrong"),
        (ERROR, HANG, "lost"),
        (ERROR, ERROR, "neither"),
        (ERROR, RIGHT, "gained"),
        (WRONG, WRONG, "wrong"),
        (WRONG, ERROR, "neither"),
        (HANG, HANG, "neither"),
        (UNFIT, UNFIT, "unfit"),
        (UNFIT, WRONG, "wrong"),
    ],
)
def test_verdicts(upstream, ours, verdict):
    assert judge(upstream, ours).name == verdict


def test_what_others_have_wrong_is_not_ours():
    assert judge(WRONG, WRONG, theirs=True).name == "neither"
    assert judge(RIGHT, WRONG, theirs=True).name == "wrong"
    assert judge(ERROR, WRONG, theirs=True).name == "wrong"


def test_errors_and_hangs_are_lost_where_refusals_need_a_reason():
    for ours in (ERROR, HANG, CRASH):
        assert judge(ours, ours).name == "neither"
        assert judge(ours, ours, explained=True).name == "lost"
    for ours in (End("refuses"), End("breaks")):
        assert judge(ERROR, ours, explained=True).name == "neither"
        assert judge(RIGHT, ours, explained=True).name == "lost"


def test_without_a_reference_the_sides_are_compared():
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    upstream = End("right", "", numbers([one]))
    assert judge(upstream, End("right", "", numbers([one.clone()]))).name == "same"
    assert judge(upstream, End("right", "", numbers([other]))).name == "wrong"
    assert judge(upstream, End("right", "", numbers([one, one]))).name == "wrong"


def test_what_differs_is_said():
    x = torch.arange(4.0)
    assert compare([x, 1], [x + 1e-7, 1]) == ""
    assert "off by 0.5" in compare([x], [x + 0.5])
    assert "expected torch.float32 [2]" in compare([x], [x[:2]])
    assert "expected 2" in compare([x], [x, x])
    assert "expected False" in compare([True], [False])


def test_records_and_figures_add_up(tmp_path):
    kept = Kept(tmp_path)
    kept.add("operators", "ours", "cond", RIGHT)
    kept.add("operators", "ours", "scan", ERROR)
    assert Kept(tmp_path).read("operators", "ours") == {"cond": RIGHT, "scan": ERROR}
    path = tmp_path / "figures.json"
    for part, lost in (("operators", 1), ("corpus", 0), ("operators", 0)):
        add_figures(path, {"parts": {part: {"commit": "a", "lost": lost}}})
    found = json.loads(path.read_text())
    assert {part: row["lost"] for part, row in found.items()} == {"operators": 0, "corpus": 0}


def parity(*arguments, timeout=600, more=()):
    done = subprocess.run(
        [sys.executable, "tools/parity.py", "--json", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *more]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])["parts"]


@pytest.mark.slow
def test_programs_that_hang_or_die_are_lost_and_the_run_goes_on(tmp_path):
    (tmp_path / "bad_programs.py").write_text(BAD)
    code, parts = parity("--plant", "bad_programs", "--seconds", "10", more=[str(tmp_path)])
    assert code == 1
    names = parts["planted"]["names"]
    assert set(names["lost"]) == {"dies", "hangs", "raises"}
    assert set(names["wrong"]) == {"differs"}
    assert parts["planted"]["same"] == 1


BAD = """
import os, time
from comparison.outcome import End

def names(part):
    return ["dies", "hangs", "raises", "differs", "works"]

def prepare(part, side):
    def run(name):
        if side == "ours":
            if name == "dies":
                os._exit(3)
            if name == "hangs":
                time.sleep(1000)
            if name == "raises":
                raise ValueError("ours")
            if name == "differs":
                return End("right", "", (2,))
        return End("right", "", (1,))
    return run
"""


SAMPLE = "^(nn_functional_(conv2d|prelu)|scatter_reduce_sum)$"


@pytest.mark.slow
@pytest.mark.sweep  # numbers of strategies have fast tests
def test_strategies_of_a_sample(tmp_path):
    """Upstream is found wrong where it is, ours is right, and records are resumed."""
    arguments = ("--part", "strategies", "--only", SAMPLE, "--results", str(tmp_path))
    code, parts = parity(*arguments)
    assert code == 0 and parts["strategies"]["same"] + parts["strategies"]["gained"] == 3
    files = {path: path.read_text() for path in tmp_path.rglob("*.jsonl")}
    (upstream,) = (text for path, text in files.items() if path.parent.name.startswith("upstream"))
    ends = {record["name"]: record for record in map(json.loads, upstream.splitlines())}
    assert ends["nn_functional_conv2d"]["status"] == "wrong"
    assert ends["scatter_reduce_sum"]["why"].startswith("no strategy")
    assert parity(*arguments) == (code, parts)
    assert files == {path: path.read_text() for path in tmp_path.rglob("*.jsonl")}


@pytest.mark.slow
@pytest.mark.sweep  # the corpus and conformance show most of it, and each night runs it
def test_the_quick_part_loses_nothing():
    code, parts = parity("--quick", "--jobs", "2", timeout=1200)
    found = {part: row["names"] for part, row in parts.items()}
    assert code == 0, json.dumps(found, indent=1)
    # A part whose programs all fail would lose nothing either. On ranks, one refuses on both sides.
    for part, row in parts.items():
        assert row["programs"] < 2 or row["same"] + row["gained"] > row["programs"] / 3, part


def test_every_part_has_quick_programs_or_says_why_not():
    without = {name for name, part in PARTS.items() if not part.quick}
    slow = {"code", "lowering", "models-compiled", "models-ranks"}  # minutes each
    sampled = {"strategies", "graphs", "corpus-ranks"}  # by tests of their own
    assert without == slow | sampled
