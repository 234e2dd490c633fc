"""What the fuzzer is made of: ranks as threads, programs as data."""

import json
import runpy

import fuzz
import pytest
import torch
import torch.distributed as dist
from fuzzing import execute, kinds, reproducer
from fuzzing.execute import Verdict
from fuzzing.group import LaunchesDiffer, on_ranks
from fuzzing.shrink import shrink


def test_results_arrive_at_the_wait():
    def body(rank):
        value = torch.full((2,), float(rank + 1))
        work = dist.all_reduce(value, async_op=True)
        early = bool(value.isnan().all())
        work.wait()
        return early, value.tolist()

    assert on_ranks(3, body) == [(True, [6.0, 6.0])] * 3


def test_ranks_that_wait_for_each_other_are_told():
    def body(rank):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        else:
            dist.barrier()

    found = [str(error) for error in on_ranks(2, body)]
    assert all("rank 0 waits for message 0 from rank 1" in text for text in found)


def test_ranks_that_launch_different_collectives_are_told():
    def body(rank):
        value = torch.ones(2)
        dist.all_reduce(value) if rank else dist.broadcast(value, 0)

    found = on_ranks(2, body)
    assert any(isinstance(error, LaunchesDiffer) for error in found)


@pytest.mark.parametrize("kind", ["graph", "c10d", "dtensor", "module"])
def test_a_program_is_what_its_number_says(kind):
    program = kinds.draw(7, kind)
    assert program == kinds.draw(7, kind)
    assert program.source() != kinds.draw(8, kind).source()
    compile(program.source(), "program", "exec")
    assert program.cut(statements=program.statements) == program.cut()


def test_a_program_is_cut_down_to_what_fails():
    program = next(
        p for p in (kinds.draw(n, "graph") for n in range(99)) if "all_gather" in p.source()
    )

    def fails(candidate):
        return Verdict("mismatch" if "all_gather" in candidate.source() else "ok")

    smaller = shrink(program, fails, "mismatch")
    assert sum("all_gather" in each.text for each in smaller.statements) == 1
    assert len(smaller.statements) <= 3 and len(smaller.outputs) == 1


@pytest.mark.parametrize("kind", ["graph", "module"])
def test_a_reproducer_runs(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "prepare", lambda: None)
    monkeypatch.setattr(kinds, "run", lambda program: execute.Verdict("ok"))
    program = kinds.draw(3, kind)
    path = reproducer.write(program, execute.Verdict("mismatch", "by 1"), tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert "mismatch" in path.read_text() and "by 1" in path.read_text()


def test_runs_add_up(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"mended": ["a hang"], "runs": []}))
    found = dict.fromkeys(fuzz._SUMMED, 0)
    for seed, commit, programs in ((2, "a", 5), (1, "a", 7), (2, "a", 9)):
        fuzz._add({"seed": seed, "commit": commit, **found, "programs": programs}, path)
    record = json.loads(path.read_text())
    assert [(run["seed"], run["programs"]) for run in record["runs"]] == [(1, 7), (2, 9)]
    assert record["programs"] == 16 and record["mended"] == ["a hang"]
