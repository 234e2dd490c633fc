"""The programs of ``test/corpus``, by its own referee: on a fake group of 8 ranks, through
Inductor's lowering, on 8 gloo ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.outcome import End, Unfit

CORPUS = Path(__file__).parents[2] / "corpus"
ENDS = {
    "pass": "right",
    "wrong": "wrong",
    "timeout": "hang",
    "eager-fails": "error",
    "break": "error",
    "error": "error",
    "recompile": "error",
}
# The rank whose programs run; a graph of another rank than the first holds other branches.
RANKS = {"corpus": 0, "lowering": 0, "lowering-rank-1": 1}
# Families whose plain tensors differ from one gloo rank to another; elsewhere they stand for
# replicated values.
SPREAD = {"c10d_sync", "async", "act", "funcol", "dist_nn", "pg", "exp", "issues"}
# What gloo leaves in the buffers of other ranks than the destination is undefined.
DESTINATION_ONLY = {"reduce", "dnf_reduce"}


def names(part: str) -> list[str]:
    """All of them, in the order of families: some build on one another."""
    lines = (CORPUS / "upstream_2.13.0.jsonl").read_text().splitlines()
    found = [json.loads(line)["name"] for line in lines]
    return found if part == "corpus-ranks" else [*found, "reduce_after_another"]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """The referee in this process, on a fake group of 8 ranks."""
    import torch.distributed as dist
    from comparison._torch import backend_named, no_kernels
    from torch._dynamo import register_backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if RANKS[part]:
        dist.init_process_group("fake", store=FakeStore(), rank=RANKS[part], world_size=8)
    backend = "aot_eager"
    if part != "corpus":
        upstream = backend_named("inductor" if side == "upstream" else "dynamo_dist")
        contextlib.ExitStack().enter_context(no_kernels())

        def lowered(gm: Any, inputs: Any, **options: Any) -> Any:
            return upstream(gm, inputs, **options)

        register_backend(lowered, name="lowered_only")
        backend = "lowered_only"
    referee = _referee(side, backend)
    _more(referee.C)
    cases = {case["name"]: case for case in referee.C.CASES}

    def run(name: str) -> End:
        with contextlib.redirect_stdout(io.StringIO()):
            record = referee.one(cases[name])
        end = ENDS[record["status"]]
        return End(end, "" if end == "right" else f"{record['status']}: {record['detail']}"[:400])

    return run


def _referee(side: str, backend: str = "aot_eager") -> Any:
    """``run.py``, which reads its options when it is imported."""
    sys.argv = ["run.py", "--backend", backend]
    if side == "ours":
        sys.argv += ["--plugin", "dynamo_dist"]
    os.chdir(CORPUS)
    sys.path.insert(0, str(CORPUS))
    found = importlib.import_module("run")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return found


def _more(common: Any) -> None:
    """Programs that mean something else on other ranks than the first."""
    import torch
    import torch.distributed as dist

    def run(a: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> Any:
        dist.all_reduce(a)
        dist.reduce(m, 0)
        return a, (m if dist.get_rank() == 0 else x)

    def reduce_after_another() -> Any:
        return run, (common.T(8, 4), common.T(8, 4), common.T(8, 4))

    common.case("c10d_sync", nofg=9)(reduce_after_another)


def mesh_of(part: str, name: str) -> tuple[int, ...]:
    """As many ranks as the programs are written for."""
    return (8,)


def on_rank(part: str, name: str, side: str, rank: int) -> End:
    """A compiled program gives what eager mode gives on this gloo rank. What eager mode cannot
    is no program for ranks.
    """
    referee, cases, spread = _on_gloo(side, rank)
    case = cases[name]
    spread.add(rank) if case["family"] in SPREAD else spread.clear()
    expected = []
    for _ in range(2 if case["opts"].get("compare") is False else 1):
        setup = referee.build(case)
        try:
            expected.append(_all_calls(referee, case, setup, setup["fn"]))
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {error}"[:200]) from error
    if len(expected) == 2 and any(map(referee.cmp, *expected)):
        raise Unfit("eager mode gives other values each time")
    config = case["opts"].get("config")
    with referee.dynamo.config.patch(**config) if config else contextlib.nullcontext():
        setup = referee.build(case)
        function = referee.compiled(case, setup, not case["opts"].get("nofg"))
        found = _all_calls(referee, case, setup, function)
    if name in DESTINATION_ONLY and rank != 0:
        return End("right")
    wrong = next(filter(None, map(referee.cmp, expected[0], found)), None)
    return End("wrong", wrong) if wrong else End("right")


@functools.cache
def _on_gloo(side: str, rank: int) -> tuple[Any, dict[str, Any], set[int]]:
    """The referee, the programs, and the set that holds the rank while plain tensors differ by
    it.
    """
    sys.path.insert(0, str(CORPUS))
    common: Any = importlib.import_module("common")
    plain, spread = common.T, set[int]()

    def tensor(*shape: int, **options: Any) -> Any:
        made = plain(*shape, **options)
        if spread:
            made.data.add_(rank)
        return made

    common.T = tensor
    referee = _referee(side)
    return referee, {case["name"]: case for case in referee.C.CASES}, spread


def _all_calls(referee: Any, case: dict[str, Any], setup: Any, function: Any) -> list[Any]:
    """The values of every call, each Work of its results waited for."""

    def waited(*args: Any) -> Any:
        out = function(*args)
        for work in referee.pytree.tree_leaves(out):
            if isinstance(work, referee.dist.Work):
                work.wait()
        return out

    with contextlib.redirect_stdout(io.StringIO()):
        return [referee.go(case, setup, waited, args) for args in setup["args_list"]]
