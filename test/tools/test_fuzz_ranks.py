"""Programs of ranks that are unlike: drawn from a number alone, and judged by what every rank
says.
"""

import json

import fuzz_ranks
import pytest
import torch
from fuzzing import loops
from fuzzing.unlike.draw import draw
from fuzzing.unlike.job import Part
from fuzzing.unlike.launches import Launch, first_difference
from fuzzing.unlike.pool import Answers
from fuzzing.unlike.verdict import judge

MESHES = ((2,), (4,), (2, 2))


def test_a_program_is_its_number():
    assert all(draw(seed, MESHES) == draw(seed, MESHES) for seed in range(50))
    for seed in range(200):
        compile(draw(seed, MESHES).source, "program", "exec")


def test_all_kinds_of_unlike_ranks_are_drawn():
    notes = {note for seed in range(300) for note in draw(seed, MESHES).notes}
    wanted = {"break later", "break first", "break uniform", "lengths last", "aside both"}
    wanted |= {"model ddp", "model fsdp2", "heads by rank", "heads by step", "local", "eager"}
    wanted |= {"autocast", "outside", "outside on one rank", "hook"}
    assert wanted | {"reset", "second job", "model both", "agreeing"} <= notes


def test_one_rank_evaluates_alone_only_what_launches_nothing():
    for seed in range(300):
        program = draw(seed, MESHES)
        for step in zip(*program.events, strict=True):
            forwards = {[event.what for event in events].count("forward") for events in step}
            assert len(forwards) == 1 or "model ddp" in program.notes


def test_only_a_batch_differs_between_ranks_that_match():
    for seed in range(200):
        program = draw(seed, MESHES)
        for step in zip(*program.events, strict=True):
            launching = [
                [
                    (e.what, e.name)
                    for e in events
                    if e.name.startswith("block") or e.what == "train"
                ]
                for events in step
            ]
            assert all(each == launching[0] for each in launching)


GATHER = Launch("0", "all_gather", ((8, "float32"),))
REDUCE = Launch("0", "all_reduce", ((8, "float32"),))


def test_launches_are_compared_by_group():
    assert first_difference([{"0": [GATHER]}, {"0": [GATHER]}]) == ""
    assert "rank 1 all_reduce" in first_difference([{"0": [GATHER]}, {"0": [REDUCE]}])
    assert "nothing" in first_difference([{"0": [GATHER]}, {"0": [GATHER, REDUCE]}])
    assert first_difference([{"0": [GATHER]}, {"1": [REDUCE]}]) == ""


def test_what_failed_is_open_until_it_runs_well(tmp_path):
    counts = dict.fromkeys(fuzz_ranks._SUMMED, 0) | {"programs": 10}
    run = {**counts, "seed": 100, "commit": "a", "ranks": "2", "at": "1", "failed": []}
    failed = [{"program": number, "class": "error", "why": ""} for number in (103, 105)]
    file = tmp_path / "runs.json"
    for each in (
        {**run, "failed": failed},
        {**run, "seed": 103, "programs": 1, "commit": "b", "at": "2"},
        {**run, "seed": 105, "programs": 1, "commit": "b", "at": "2", "ranks": "4"},
        {**run, "seed": 105, "programs": 1, "commit": "0", "at": "0"},
    ):
        fuzz_ranks._add(each, file)
    record = json.loads(file.read_text())
    assert (record["programs"], record["open"]) == (13, [105])


def _answers(program, **said):
    last = dict.fromkeys(range(program.ranks), "job 0, step 3")
    done = {rank: Part(scheduled=True) for rank in range(program.ranks)}
    return Answers(**{"last": last, "done": done, **said})


def _of(note):
    return next(p for p in (draw(seed, MESHES) for seed in range(300)) if note in p.notes)


def _raised(name, text):
    return {0: (["BackendCompilerFailed", name], text, "")}


@pytest.mark.parametrize(
    ("note", "said", "word"),
    [
        ("break no", {}, "ok"),
        ("break no", {"late": [0]}, "hang"),
        ("break no", {"died": [1]}, "crash"),
        ("break no", {"idle_s": 29.0}, "stall"),
        ("break no", {"errors": _raised("CannotFollowError", "")}, "error"),
        ("break later", {"errors": _raised("CannotFollowError", "")}, "cannot_follow"),
        ("break later", {"errors": _raised("RanksDifferError", "differ")}, "error"),
        ("break no", {"late": [0], "last": {0: "eager, step 1"}}, "refused"),
    ],
)
def test_verdicts(note, said, word):
    program = _of(note)
    assert judge(program, _answers(program, **said)).word == word


def test_a_wrong_number_is_a_mismatch():
    program = _of("break no")
    answers = _answers(program)
    answers.done[1].mismatch = "off"
    assert judge(program, answers).word == "mismatch"
    answers.done[1] = Part(compiled=[{"0": [GATHER]}])
    answers.done[0] = Part(compiled=[{"0": [REDUCE]}])
    assert judge(program, answers).word == "mismatch"


def test_loops_read_and_write_as_pointers_do():
    x = torch.arange(12.0).reshape(3, 4)[1:]
    rows, columns = loops.indices((2, 4))
    value = loops.load(x, columns + 4 * rows)
    assert torch.equal(value, x)
    out = torch.empty(4, 2)
    loops.store(out, rows + 2 * columns, loops.op("mul", value, 2.0), (2, 4))
    assert torch.equal(out, 2 * x.t())
    assert torch.equal(loops.reduce("sum", torch.float32, value, (2, 4), 1), x.sum(1, keepdim=True))
