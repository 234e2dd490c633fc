"""Compile caches: where they are, what they count, what is in their keys."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.torch_compat.c10d import default_group, global_rank, world_size
from inductor_passes.torch_compat.meshes import unpickled_as


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
def keyed_by_rank(wanted: bool = True) -> Iterator[None]:
    """Compiles in the block share no cache entry with other ranks; with ``wanted`` false they do, also inside such a block.

    AOTAutograd's key holds a mesh, not where in it this process stands, but its graphs have that burnt in.
    ``torch.compiler.config.cache_key_tag`` was seen in 2.11 to 2.15, and so was that ``config.patch`` leaves the value that it
    found as one that the user has set.
    """
    config: Any = torch.compiler.config
    if default_group() is None:
        yield
        return
    mark = f" rank {global_rank()} of {world_size()}"
    tag = f"{config.cache_key_tag.removesuffix(mark)}{mark if wanted else ''}"
    restore = config._make_closure_patcher(cache_key_tag=tag)()
    try:
        yield
    finally:
        restore()


def looks_again() -> bool:
    """Return whether torch asks us what to do where its cache has no entry: while ``dynamo_dist`` is enabled."""
    from torch._inductor.codecache import FxGraphCache

    return hasattr(getattr(FxGraphCache, "load_with_key", None), "dist_looks_again")


def newest_entry(key: str) -> bytes | None:
    """The entry of a key in Inductor's cache that was written last. ``_get_tmp_dir_for_key`` was seen in 2.11 to 2.14."""
    try:
        with os.scandir(_entries(key)) as found:
            files = [(each.stat().st_mtime_ns, each.path) for each in found if each.is_file()]
        return Path(max(files)[1]).read_bytes() if files else None
    except OSError:
        return None


def put_entry(key: str, entry: bytes) -> bool:
    """Write an entry as Inductor names it, whole or not at all; returns whether it could be written."""
    from torch._inductor.codecache import sha256_hash, write_atomic

    try:
        write_atomic(os.path.join(_entries(key), sha256_hash(entry)), entry, make_dirs=True)
    except OSError:
        return False
    return True


def _entries(key: str) -> str:
    from torch._inductor.codecache import FxGraphCache

    return str(FxGraphCache._get_tmp_dir_for_key(key))


def torch_version() -> str:
    """Version and, where torch knows it, commit: both belong in a cache key."""
    return f"{torch.__version__}+{getattr(torch.version, 'git_version', '')}"


class TracedEntries:
    """What one compile asks AOTAutograd's cache for. ``key``: that of its graph, "" where the cache was not asked; ``made``: the entry it wrote."""

    def __init__(self) -> None:
        self.key = ""
        self.made: bytes | None = None


@contextlib.contextmanager
def traced_entries() -> Iterator[TracedEntries]:
    """Note what AOTAutograd's cache is asked for in the block. ``_lookup`` and ``_write_to_local_cache`` were seen in 2.11 to 2.14."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    noted, owner = TracedEntries(), cast(Any, AOTAutogradCache)
    names = ("_lookup", "_write_to_local_cache")
    if not all(name in vars(owner) for name in names):
        yield noted
        return
    lookup, write = (getattr(owner, name) for name in names)
    stock = [vars(owner)[name] for name in names]

    def noted_lookup(key: str, *args: Any, **kwargs: Any) -> Any:
        noted.key = noted.key or key
        return lookup(key, *args, **kwargs)

    def noted_write(key: str, content: bytes) -> None:
        write(key, content)
        if key == noted.key:
            noted.made = content

    owner._lookup, owner._write_to_local_cache = map(staticmethod, (noted_lookup, noted_write))
    try:
        yield noted
    finally:
        for name, was in zip(names, stock, strict=True):
            setattr(owner, name, was)


def put_traced_entry(key: str, entry: bytes) -> None:
    """Write an entry into AOTAutograd's cache. Raises OSError."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    AOTAutogradCache._write_to_local_cache(key, entry)


def own_traced_entry(entry: bytes, meshes: Mapping[str, DeviceMesh]) -> bytes:
    """Return an entry of another rank as this one's, whose meshes are ``meshes``, by what they hold.

    Raises UnknownMeshError, and whatever a damaged entry makes of its own bytes.
    """
    with unpickled_as(meshes):
        return pickle.dumps(pickle.loads(entry))
