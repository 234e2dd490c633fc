"""One rank's part in one program: eager, then compiled, each as a job of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzzing.unlike.launches import Launch, by_group, recorded
from fuzzing.unlike.names import names_of
from fuzzing.unlike.program import Program
from fuzzing.unlike.steps import Seen, Steps

import dynamo_dist
from dynamo_dist.numerics.differences import how_far
from inductor_passes.records import GraphRecord
from inductor_passes.report import recorder


@dataclass
class Part:
    """What one rank has seen. ``mismatch``: in words, or ""; launches by group, of each job."""

    eager: dict[str, list[Launch]] = field(default_factory=dict)
    compiled: list[dict[str, list[Launch]]] = field(default_factory=list)
    mismatch: str = ""
    scheduled: bool = False
    reordered: bool = False
    cut: bool = False


# Options of all programs of a run, as JSON: ``compile`` and ``split``; ``null`` runs upstream's own
# backend.
OPTIONS = "FUZZ_RANKS_OPTIONS"


def take_part(
    program: Program, rank: int, store: Any, folder: Path, beat: Callable[[str], None]
) -> Part:
    """Run the program. ``store``: of its ranks alone; ``folder``: where caches go; ``beat``
    hears of each step.
    """
    part = Part()
    dynamo_dist.disable()
    with _job(program, rank, store, "eager") as (names, launched):
        expected = _all(Steps(program, rank, names, lambda function: function), beat, "eager")
    order = [each for each in launched if each.kind != "barrier"]
    part.eager = by_group(launched)
    cache = folder / ("shared" if program.caches == "shared" else f"rank{rank}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    of_all = json.loads(os.environ.get(OPTIONS, "{}"))
    settings: dict[str, Any] = {"backend": "inductor"}
    if of_all is not None:
        settings = {"backend": "dynamo_dist", "options": {**program.options, **of_all}}
    for number in range(1 if program.warm is None else 2):
        stage = f"job {number}"
        if number and rank not in (program.warm or ()) and program.caches == "own":
            shutil.rmtree(cache, ignore_errors=True)
        torch._dynamo.reset()
        if program.late == rank:
            time.sleep(1.0)
        with (
            recorder.records_of_block() as records,
            _job(program, rank, store, stage) as (names, launched),
        ):
            steps = Steps(
                program,
                rank,
                names,
                lambda function: torch.compile(function, dynamic=program.dynamic[rank], **settings),
            )
            found = _all(steps, beat, stage)
        part.compiled.append(by_group(launched))
        part.mismatch = part.mismatch or _difference(expected, found, stage, program.tolerance)
        part.scheduled |= any(record.schedule is not None for record in records)
        part.cut |= any(record.split and record.split.parts > 1 for record in records)
        now = [each for each in launched if each.kind != "barrier"]
        part.reordered |= now != order and any(_moved(record) for record in records)
    torch._dynamo.reset()
    return part


def _all(steps: Steps, beat: Callable[[str], None], stage: str) -> Seen:
    for step in range(steps.count):
        beat(f"{stage}, step {step}")
        steps.run(step)
    return steps.seen


@contextlib.contextmanager
def _job(
    program: Program, rank: int, store: Any, stage: str
) -> Iterator[tuple[dict[str, Any], list[Launch]]]:
    """The program's names in a job of its own, with groups and functions that no other job has,
    and what it launches.
    """
    own = dist.PrefixStore(stage, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=program.ranks)
    try:
        names = names_of(program, rank)
        with recorded() as launched:
            yield names, launched
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _moved(record: GraphRecord) -> bool:
    """Whether a pass moved or merged launches."""
    return any(each.changed for each in record.passes)


def _difference(expected: Seen, found: Seen, stage: str, tolerance: float) -> str:
    for name in sorted({*expected, *found}):
        if name not in expected and "gradient" in name and not found[name].any():
            # what nothing reads behind a graph break has a gradient of zeros, in upstream torch too
            continue
        if name not in expected or name not in found:
            where = "compiled" if name in found else "eager"
            return f"{stage}, {name}: only in {where} mode"
        theirs, mine = expected[name], found[name]
        if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            says = f"{tuple(mine.shape)} {mine.dtype}, eager {tuple(theirs.shape)} {theirs.dtype}"
            return f"{stage}, {name}: {says}"
        if problem := how_far(mine, theirs, tolerance):
            return f"{stage}, {name}: {problem}"
    return ""
