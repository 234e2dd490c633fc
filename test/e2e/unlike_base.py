"""What programs of ranks that are unlike each other are made of (``unlike_worker.py``)."""

import contextlib
import functools
import io
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

WIDTH = 32


def drawn(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5


def compiled(function, **settings):
    return torch.compile(function, backend="dynamo_dist", **settings)


def compare(step, calls, **settings):
    """``step(*inputs)`` for each of ``calls``, eager and compiled."""
    fast = compiled(step, **settings)
    for number, inputs in enumerate(calls):
        expected = step(*inputs)
        with contextlib.redirect_stdout(io.StringIO()):
            found = fast(*inputs)
        for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                return f"call {number}, output {at} is off by {(mine - theirs).abs().max():.3g}"
    return "ok"


def gather_then_reduce(between=lambda y: None):
    w = drawn(WIDTH // 2, WIDTH, seed=1)

    def step(x):
        whole = fc.all_gather_tensor(w, 0, dist.group.WORLD)
        y = torch.relu(x @ whole)
        between(y)
        total = fc.all_reduce(y.mean(0) * 2, "sum", dist.group.WORLD)
        return y @ whole, total + 1

    return step


def batch(rows=8):
    return (drawn(rows, WIDTH, seed=6),)


@functools.cache
def job_store(rank, first=False):
    """What the job's ranks share as long as it runs, through all restarts."""
    port, wait = int(os.environ["MASTER_PORT"]), timedelta(seconds=600)
    return dist.TCPStore("127.0.0.1", port, is_master=first, timeout=wait, wait_for_workers=False)


def cache_folder(rank, shared=False):
    folder = Path(os.environ["CASE_FOLDER"]) / ("shared" if shared else f"cache{rank}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder
