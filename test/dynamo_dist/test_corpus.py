"""The program corpus with this package enabled: whatever upstream passes, and what it gains.

``test/corpus`` holds 366 small programs with their referee, ``upstream_VERSION.jsonl`` what
upstream torch makes of them, ``gained.txt`` those that pass besides in 2.13, and
``exceptions.json`` those that do not, each with its cause and the fix.
"""

import json
import os
from pathlib import Path

import forked
import pytest
import torch
from comparison import ranks
from comparison.outcome import End
from comparison.parts import PARTS

CORPUS = Path(__file__).parents[1] / "corpus"
VERSION = torch.__version__.split("+")[0]
UPSTREAM = CORPUS / f"upstream_{VERSION}.jsonl"
GUARDED_GROUPS = {
    f"rc_pg_changes_{what}"
    for what in ("rank_size", "get_world_size", "ranks", "eq", "is_", "dict_key", "attr")
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not UPSTREAM.exists(), reason=f"no results of upstream torch {VERSION}"),
]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def exceptions():
    """The exceptions of this torch."""
    minor = ".".join(VERSION.split(".")[:2])
    found = json.loads((CORPUS / "exceptions.json").read_text())
    return [entry for entry in found if minor in entry.get("versions", [minor])]


def run(names, folder, part, *options, plugin="dynamo_dist"):
    """Start ``run_some.py`` on ``names`` in a process of its own."""
    wanted, out = folder / f"names{part}", folder / f"out{part}.jsonl"
    wanted.write_text("\n".join(names))
    command = [CORPUS / "run_some.py", wanted, "--plugin", plugin, "--out", out, *options]
    env = {**os.environ, "PYTHONPATH": str(CORPUS.parents[1]), "OMP_NUM_THREADS": "1"}
    return out, forked.Script(*command, cwd=CORPUS, env=env, together=folder / f"log{part}")


@pytest.mark.parametrize(
    "every", [6, pytest.param(1, marks=pytest.mark.sweep)], ids=["a sixth", "all"]
)
def test_what_upstream_passes_passes_and_what_was_gained_stays(every, tmp_path):
    """All that is gained, and of what upstream passes a sixth, or all: what is launched is
    looked at for a third.
    """
    upstream = records(UPSTREAM)
    passed_by_upstream = {record["name"] for record in upstream if record["status"] == "pass"}
    gained = set((CORPUS / "gained.txt").read_text().split())
    assert not gained & passed_by_upstream
    assert gained >= GUARDED_GROUPS
    expected = gained | {
        record["name"] for record in upstream[::every] if record["name"] in passed_by_upstream
    }
    assert len(expected) > 120

    # Two processes; families stay together, because some of their programs build on one another.
    families = sorted({record["family"] for record in upstream})
    found = {}
    parts = []
    for part in range(2):
        mine = set(families[part::2])
        names = [r["name"] for r in upstream if r["family"] in mine and r["name"] in expected]
        parts.append(run(names, tmp_path, part, "--timeout", "600"))
    for out, process in parts:
        assert process.wait(timeout=840) == 0
        found |= {record["name"]: record for record in records(out)}

    failed = {
        name: found.get(name) for name in expected if found.get(name, {}).get("status") != "pass"
    }
    assert failed == {}


def test_each_upstream_program_passes_or_is_an_exception():
    names = {record["name"] for record in records(UPSTREAM)}
    fails_in_eager = {r["name"] for r in records(UPSTREAM) if r["status"] == "eager-fails"}
    passed_by_upstream = {r["name"] for r in records(UPSTREAM) if r["status"] == "pass"}
    gained = set((CORPUS / "gained.txt").read_text().split())
    excepted = {entry["case"] for entry in exceptions()}
    assert len(excepted) <= 12
    assert not excepted & (gained | passed_by_upstream)
    if VERSION.startswith("2.13"):  # the version of gained.txt
        assert names - fails_in_eager == gained | passed_by_upstream | excepted


def test_the_exceptions_break_with_their_fix(tmp_path):
    names = [entry["case"] for entry in exceptions()]
    out, process = run(names, tmp_path, 0, "--trace")
    assert process.wait(timeout=300) == 0
    found = {record["name"]: record["status"] for record in records(out)}
    text = " ".join((tmp_path / "log0").read_text().split())
    recompiled = {"act_vs_tensor_recompile"}  # no break, and so no text
    for entry in exceptions():
        is_break = entry["case"] not in recompiled
        assert found[entry["case"]] == ("break" if is_break else "recompile")
        if is_break:
            assert " ".join(entry["fix"].split()) in text, entry["case"]


def script(*arguments, timeout_s=300):
    """The JSON lines that a script of the corpus prints."""
    env = {**os.environ, "PYTHONPATH": str(CORPUS.parents[1]), "OMP_NUM_THREADS": "1"}
    done = forked.run_script(
        CORPUS / arguments[0], *arguments[1:], cwd=CORPUS, env=env, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_after_disable_programs_end_as_with_upstream(tmp_path):
    """A family of each kind, with what upstream passes, breaks and gets wrong; the whole:
    compare.py.
    """
    upstream = [r for r in records(UPSTREAM) if r["family"] in ("recompile", "async", "pg")]
    assert {"pass", "break", "wrong"} <= {record["status"] for record in upstream}
    out, process = run([record["name"] for record in upstream], tmp_path, 0, plugin="disabled")
    assert process.wait(timeout=420) == 0
    found = {record["name"]: (record["status"], record.get("graphs")) for record in records(out)}
    assert found == {
        record["name"]: (record["status"], record.get("graphs")) for record in upstream
    }


# One program each of: list, scatter, gradients, views, uneven shards, tensor parallel, a Work.
ON_RANKS = """all_gather_list reduce_scatter_list autograd_function_pg_global async_work_list
redistribute_uneven redistribute_partial_2d mlp_nobias loss_parallel_inside coalescing_manager""".split()


def test_programs_equal_eager_on_eight_real_ranks():
    part = PARTS["corpus-ranks"]
    found = dict(ranks.run(part, ON_RANKS, "ours", part.seconds))
    assert found == dict.fromkeys(ON_RANKS, End("right"))


def test_explain_lists_all_breaks_of_a_program():
    """Each with a fixed kind, the user's line, why, and a fix."""
    names = ["from_local_run_check", "comm_debug_mode_inside", "scatter_object_list"]
    found = {record["name"]: record for record in script("explain_breaks.py", *names)}
    assert set(found) == set(names)
    assert len(found["from_local_run_check"]["breaks"]) > 1
    for record in found.values():
        assert not record["error"]
        for each in record["breaks"]:
            assert each["kind"] and each["explanation"] and each["fix"], each
            assert "/corpus/f_" in each["user_line"], each
