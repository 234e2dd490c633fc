"""Programs as parts: torch without distribution in this process, DTensors on ranks that are its
threads.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from comparison._torch import no_kernels
from comparison.outcome import End, end_of
from comparison.program import Given, Pairs, judged, known, mesh_on_cpu


def names(part: str) -> list[str]:
    """A program, and each way to run it; on real ranks there is one."""
    if part == "dtensors-ranks":
        return sorted(name for name, each in known("dtensors").items() if "gloo" in each.ways)
    kind = "dtensors" if part == "dtensors" else "features"
    ways = [(name, way) for name, each in known(kind).items() for way in each.ways]
    return [
        f"{name}-{way}"
        for name, way in ways
        if way != "gloo" and (way == "code") == (part == "code")
    ]


def mesh_of(part: str, name: str) -> tuple[int, ...]:
    """The sizes of a program's mesh."""
    return known("dtensors")[name].mesh


def on_rank(part: str, name: str, side: str, rank: int) -> End:
    """Run a program on this rank of several processes."""
    program = known("dtensors")[name]
    pairs = program.run(Given("gloo", side, mesh_on_cpu(program.mesh), rank))
    return judged(pairs, f"rank {rank}, ", 1e-5)


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Runs a program in one way."""
    programs = known("dtensors" if part == "dtensors" else "features")

    def run(program: str) -> End:
        name, way = program.rsplit("-", 1)
        each = programs[name]
        with no_kernels() if way == "lowered" else contextlib.nullcontext():
            if each.mesh:
                return on_all_ranks(
                    each.mesh, lambda rank, mesh: each.run(Given(way, side, mesh, rank))
                )
            torch._dynamo.reset()
            torch.manual_seed(0)
            return judged(each.run(Given(way, side)), relative=1e-4)

    return run


def on_all_ranks(
    sizes: tuple[int, ...], pairs: Callable[[int, Any], Pairs], relative: float | None = None
) -> End:
    """What ``pairs(rank, mesh)`` yields on every rank, judged; the first rank's own fault, if
    any.
    """
    from fuzzing._torch import without_timed_guards
    from fuzzing.group import on_ranks
    from fuzzing.turns import Hang

    # Ranks of one process share a compile lock: their check would wait for itself.
    os.environ["INDUCTOR_PASSES_AGREEMENT_SECONDS"] = "0"
    without_timed_guards()
    torch._dynamo.reset()

    def body(rank: int) -> End:
        mesh = mesh_on_cpu(sizes)
        torch.manual_seed(0)
        return judged(pairs(rank, mesh), f"rank {rank}, ", relative)

    results = on_ranks(math.prod(sizes), body)
    errors = [each for each in results if isinstance(each, BaseException)]
    ends = [each for each in results if isinstance(each, End)]
    if wrong := [end for end in ends if end.status == "wrong"]:
        return wrong[0]
    if own := [each for each in errors if not isinstance(each, Hang)]:
        return end_of(own[0])
    return End("hang", str(errors[0])[:300]) if errors else ends[0]
