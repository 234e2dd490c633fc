"""Private torch names for ranks that are threads, seen in torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import guards
from torch._dynamo.exc import Unsupported as Unsupported
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import multi_threaded_pg

# The one name for which torch tells meshes of several threads apart.
BACKEND = "threaded"


@contextlib.contextmanager
def threads_as_ranks(create: Callable[..., Any]) -> Iterator[None]:
    """Each thread in the block has its own groups, made by ``create(store, rank, size,
    timeout)``.
    """
    plugins: Any = dist.Backend._plugins
    plugins[BACKEND.upper()] = plugins[BACKEND.upper()]._replace(creator_fn=create)
    _forget_meshes()
    multi_threaded_pg._install_threaded_pg()
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()


def _forget_meshes() -> None:
    """Thread numbers are used again, and with them the meshes of an earlier run look like those
    of this one.
    """
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    cached: Any = _redistribute._gen_transform_infos
    cached.cache_clear()


def without_timed_guards() -> None:
    """Dynamo measures how long the guards of each compile take, with caches flushed; nobody
    reads it here.
    """
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *arguments: 0.0
