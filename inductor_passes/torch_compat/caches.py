"""Compile caches: where they are, what they count, what is in their keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from inductor_passes.torch_compat.c10d import default_group, global_rank, world_size


def cache_dir() -> str:
    """Inductor's cache folder. Seen in 2.11 to 2.15."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as stock

    return str(stock())


def counters() -> dict[str, int]:
    """Inductor's counters. A cached graph brings the counts of its compile back when it is loaded.

    Seen in 2.11 to 2.15.
    """
    from torch._dynamo.utils import counters as stock

    return stock["inductor"]


@contextlib.contextmanager
def no_compile_caches() -> Iterator[None]:
    """Neither Inductor's nor AOTAutograd's cache in the block. Seen in 2.11 to 2.15."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def keyed_by_rank() -> Iterator[None]:
    """Compiles in the block share no cache entry with other ranks.

    AOTAutograd's key holds a mesh, not where in it this process stands, but its graphs have that burnt in.
    ``torch.compiler.config.cache_key_tag`` was seen in 2.11 to 2.15, and so was that ``config.patch`` leaves the value that it
    found as one that the user has set.
    """
    config: Any = torch.compiler.config
    if default_group() is None:
        yield
        return
    tag = f"{config.cache_key_tag} rank {global_rank()} of {world_size()}"
    restore = config._make_closure_patcher(cache_key_tag=tag)()
    try:
        yield
    finally:
        restore()


def torch_version() -> str:
    """Version and, where torch knows it, commit: both belong in a cache key."""
    return f"{torch.__version__}+{getattr(torch.version, 'git_version', '')}"
