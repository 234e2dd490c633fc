"""The programs of ``test/corpus``, by its own referee; also through Inductor's lowering, on two ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.outcome import End

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


def names(part: str) -> list[str]:
    """All of them, in the order of families: some build on one another."""
    lines = (CORPUS / "stock_2.13.0.jsonl").read_text().splitlines()
    return [json.loads(line)["name"] for line in lines] + ["reduce_after_another"]


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
        stock = backend_named("inductor" if side == "stock" else "dynamo_dist")
        contextlib.ExitStack().enter_context(no_kernels())

        def lowered(gm: Any, inputs: Any, **options: Any) -> Any:
            return stock(gm, inputs, **options)

        register_backend(lowered, name="lowered_only")
        backend = "lowered_only"
    sys.argv = ["run.py", "--backend", backend]
    if side == "ours":
        sys.argv += ["--plugin", "dynamo_dist"]
    os.chdir(CORPUS)
    sys.path.insert(0, str(CORPUS))
    referee = importlib.import_module("run")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _more(referee.C)
    cases = {case["name"]: case for case in referee.C.CASES}

    def run(name: str) -> End:
        with contextlib.redirect_stdout(io.StringIO()):
            record = referee.one(cases[name])
        end = ENDS[record["status"]]
        return End(end, "" if end == "right" else f"{record['status']}: {record['detail']}"[:400])

    return run


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
