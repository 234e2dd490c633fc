"""One rank of a script on a fake process group: its graphs, and what each launches.

The script runs as it is, but for three things: ``init_process_group`` makes a fake group, which
moves no data; compiled functions stop after Inductor's graph passes and run uncompiled; and
``torch.compile`` without a backend gets these passes.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from inductor_passes import _torch, recorder
from inductor_passes.compile import compile_graph, graph_passes_only
from inductor_passes.records import OWN_SHARES, GraphRecord
from inductor_passes.verify_ranks.compare import Launch


@dataclass
class Traced:
    """What one rank did. ``graphs``: id -> launches in order. ``error``: what stopped the script, or ""."""

    rank: int
    graphs: dict[str, list[Launch]] = field(default_factory=dict)
    error: str = ""


def trace_rank(script: str, arguments: Sequence[str], rank: int, world_size: int) -> Traced:
    """Run ``script`` as one rank of ``world_size``. Call it in a process of its own."""
    found = Traced(rank)

    def keep(record: GraphRecord) -> None:
        groups = _torch.known_groups()
        found.graphs[record.graph_id] = [
            Launch(
                c.kind,
                groups.get(c.group_name, tuple(range(world_size))),
                0 if c.kind in OWN_SHARES else c.payload_bytes,
                c.dtype,
                c.reduce_op,
            )
            for c in record.collectives
            if c.agreed()
        ]

    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    unsubscribe = recorder.subscribe(keep)
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(sys, "argv", [script, *arguments]),
            mock.patch.object(dist, "init_process_group", _init_fake(rank, world_size)),
            mock.patch.object(torch, "compile", _with_passes(torch.compile)),
            graph_passes_only(),
        ):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            found.error = f"it exits with {leaving.code}"
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found.error = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    finally:
        unsubscribe()
    return found


def _init_fake(rank: int, world_size: int) -> Callable[..., None]:
    stock = dist.init_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            with mock.patch.object(dist, "init_process_group", stock):
                _torch.init_fake_group(world_size, rank)

    return init


def _with_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` whose default backend runs these passes."""

    @functools.wraps(stock)
    def compile_(model: Any = None, *, backend: Any = "inductor", **kwargs: Any) -> Any:
        if model is None:
            return lambda decorated: compile_(decorated, backend=backend, **kwargs)
        if backend == "inductor":
            mode, options = kwargs.pop("mode", None), kwargs.pop("options", None)
            backend = functools.partial(compile_graph, mode=mode, options=options)
        return stock(model, backend=backend, **kwargs)

    return compile_
