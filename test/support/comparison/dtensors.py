"""DTensor programs on all ranks, which are threads of one process, against one device."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from comparison.outcome import End, compare, end_of

PROGRAMS: dict[str, Program] = {}
_THEMES = ("functions", "loops", "launches")
BACKENDS = ("eager", "aot_eager")


@dataclass(frozen=True, slots=True)
class Program:
    """Run on each rank; yields what it found there and what is right."""

    run: Callable[..., Iterator[tuple[Any, Any]]]
    mesh: tuple[int, ...]
    backends: tuple[str, ...]


def program(*mesh: int, backends: tuple[str, ...] = BACKENDS) -> Callable[..., Any]:
    """Register under the function's name, to be run on a mesh of these sizes."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[run.__name__.strip("_")] = Program(run, mesh or (4,), backends)
        return run

    return register


def known() -> dict[str, Program]:
    """Every program by its name."""
    for theme in _THEMES:
        importlib.import_module(f"comparison.dtensors_{theme}")
    return PROGRAMS


def names(part: str) -> list[str]:
    """A program, in eager mode and compiled."""
    ways = [(name, way) for name, each in known().items() for way in each.backends]
    return [f"{name}-{way}" for name, way in ways if way != "gloo"]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Runs a program on as many threads as its mesh has ranks."""
    programs = known()

    def run(name: str) -> End:
        from comparison._torch import no_kernels

        name, way = name.rsplit("-", 1)
        each = programs[name]
        with no_kernels() if way == "lowered" else contextlib.nullcontext():
            return on_all_ranks(
                each.mesh, lambda rank, mesh: each.run(mesh, rank, _compile(way, side))
            )

    return run


def _compile(way: str, side: str) -> Callable[..., Any]:
    """As users compile: a break is no fault, unless the program asks for ``one_graph``."""
    import torch

    def identity(function: Any) -> Any:
        return function

    if way == "eager":
        return identity
    inductor = "inductor" if side == "stock" else "dynamo_dist"
    backend = {"lowered": inductor, "one_graph": "aot_eager"}.get(way, way)
    return lambda f: torch.compile(f, backend=backend, fullgraph=way == "one_graph")


def on_all_ranks(
    sizes: tuple[int, ...], pairs: Callable[[int, Any], Any], relative: float | None = None
) -> End:
    """What ``pairs(rank, mesh)`` yields on every rank, judged; the first rank's own fault, if any."""
    import math

    import torch
    from fuzzing._torch import without_timed_guards
    from fuzzing.group import on_ranks
    from fuzzing.turns import Hang
    from torch.distributed.device_mesh import init_device_mesh

    # Ranks of one process share a compile lock: their check would wait for itself.
    os.environ["DYNAMO_DIST_AGREEMENT_SECONDS"] = "0"
    without_timed_guards()
    torch._dynamo.reset()

    def body(rank: int) -> str:
        names = ("dp", "tp", "pp")[: len(sizes)] if len(sizes) > 1 else ("tp",)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        torch.manual_seed(0)
        for at, (found, expected) in enumerate(pairs(rank, mesh)):
            if problem := compare(found, expected, f"rank {rank}, pair {at}", relative):
                return problem
        return ""

    results = on_ranks(math.prod(sizes), body)
    errors = [each for each in results if isinstance(each, BaseException)]
    own = [each for each in errors if not isinstance(each, Hang)]
    wrong = next((each for each in results if isinstance(each, str) and each), "")
    if wrong:
        return End("wrong", wrong)
    if own:
        return end_of(own[0])
    if errors:
        return End("hang", str(errors[0])[:300])
    return End("right")
