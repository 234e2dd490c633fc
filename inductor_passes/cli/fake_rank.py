"""Run a script as one rank of a job that is not there: on a fake process group, without compiling code.

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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from inductor_passes.attach.session import compile_with_passes, graph_passes_only
from inductor_passes.torch_compat import c10d


def run_script(script: str, arguments: Sequence[str], rank: int, world_size: int) -> str:
    """Run ``script`` as one rank of ``world_size``; what stopped it, or "". Call it in a process of its own."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
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
            return f"it exits with {leaving.code}"
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    return ""


def _init_fake(rank: int, world_size: int) -> Callable[..., None]:
    stock = dist.init_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            with mock.patch.object(dist, "init_process_group", stock):
                c10d.init_fake_group(world_size, rank)

    return init


def _with_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` whose default backend runs these passes."""

    @functools.wraps(stock)
    def compile_(model: Any = None, *, backend: Any = "inductor", **kwargs: Any) -> Any:
        if model is None:
            return lambda decorated: compile_(decorated, backend=backend, **kwargs)
        if backend == "inductor":
            mode, options = kwargs.pop("mode", None), kwargs.pop("options", None)
            backend = functools.partial(compile_with_passes, mode=mode, options=options)
        return stock(model, backend=backend, **kwargs)

    return compile_
