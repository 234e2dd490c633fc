"""Compile caches: where they are, what they count, what is in their keys and entries.

They are pickles, as torch's own caches are, and run what they hold. One is read that came through
the job's store, where ranks put nothing but what they compiled, under a digest that its maker
announced there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.torch_compat import TorchFunction, wrapped
from inductor_passes.torch_compat.c10d import default_group, global_rank, world_size
from inductor_passes.torch_compat.meshes import unpickled_as, without_places


def cache_dir() -> str:
    """Inductor's cache folder. Seen in 2.11 to 2.15."""
    # Loads all of Inductor, as any import of ``torch._inductor`` does.
    from torch._inductor.runtime.cache_dir_utils import cache_dir as upstream

    return str(upstream())


def counters() -> dict[str, int]:
    """Inductor's counters. A cached graph brings the counts of its compile back when it is loaded.

    Seen in 2.11 to 2.15.
    """
    from torch._dynamo.utils import counters as upstream  # loads all of Dynamo

    return upstream["inductor"]


@contextlib.contextmanager
def no_compile_caches() -> Iterator[None]:
    """Neither Inductor's nor AOTAutograd's cache in the block. Seen in 2.11 to 2.15."""
    from torch._inductor import config  # loads all of Inductor

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def keyed_by_rank(wanted: bool = True) -> Iterator[None]:
    """Compiles in the block share no cache entry with other ranks; with ``wanted`` false they do,
    also inside such a block.

    AOTAutograd's key holds a mesh, not where in it this process stands, but its graphs have that
    burnt in. ``torch.compiler.config.cache_key_tag`` was seen in 2.11 to 2.15, and so was that
    ``config.patch`` leaves the value that it found as one that the user has set.
    """
    config: Any = torch.compiler.config
    if default_group() is None:
        yield
        return
    mark = f" rank {global_rank()} of {world_size()}"
    tag = f"{config.cache_key_tag.removesuffix(mark)}{mark if wanted else ''}"
    # Not ``config.patch``: it marks the tag as set by the user once it restores, and that is part
    # of cache keys.
    restore = config._make_closure_patcher(cache_key_tag=tag)()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def lowered_entries(missed: Callable[[str], bool]) -> Iterator[None]:
    """Call ``missed`` with the key of each graph that Inductor's cache lacks in the block: whether
    to look once more.

    ``FxGraphCache.load_with_key`` was seen in 2.11 to 2.15.
    """
    from torch._inductor.codecache import FxGraphCache  # loads all of Inductor

    def looking_again(upstream: TorchFunction) -> TorchFunction:
        def load_with_key(key: str, *args: object, **kwargs: object) -> object:
            found = upstream(key, *args, **kwargs)
            # The second look finds what ``missed`` has put there meanwhile, such as another rank's
            # entry.
            return upstream(key, *args, **kwargs) if found[0] is None and missed(key) else found

        return load_with_key

    with wrapped(FxGraphCache, "load_with_key", looking_again):
        yield


def newest_entry(key: str) -> bytes | None:
    """The entry of a key in Inductor's cache that was written last. ``_get_tmp_dir_for_key`` was
    seen in 2.11 to 2.14.
    """
    try:
        with os.scandir(_entries(key)) as found:
            files = [(each.stat().st_mtime_ns, each.path) for each in found if each.is_file()]
        return Path(max(files)[1]).read_bytes() if files else None
    except OSError:
        return None


def put_entry(key: str, entry: bytes) -> bool:
    """Write an entry as Inductor names it, whole or not at all; returns whether it could be
    written.
    """
    try:
        _write(_entries(key), entry)
    except OSError:
        return False
    return True


def _write(folder: str, entry: bytes) -> None:
    """Write an entry under the name that torch gives its content. Raises OSError."""
    # The folder of a key holds one file for each set of guards on sizes, named by its content:
    # torch tries them all, and equal entries of several ranks are one file.
    from torch._inductor.codecache import sha256_hash, write_atomic  # loads all of Inductor

    write_atomic(os.path.join(folder, sha256_hash(entry)), entry, make_dirs=True)


def _entries(key: str) -> str:
    from torch._inductor.codecache import FxGraphCache  # loads all of Inductor

    return str(FxGraphCache._get_tmp_dir_for_key(key))


def torch_version() -> str:
    """Version and, where torch knows it, commit: both belong in a cache key."""
    return f"{torch.__version__}+{getattr(torch.version, 'git_version', '')}"


class TracedEntries:
    """What one compile asks AOTAutograd's cache for. ``key``: that of its graph, "" where the
    cache was not asked.
    """

    def __init__(self) -> None:
        self.key = ""
        self._key_again: Callable[[], str] | None = None
        self._before: set[str] = set()

    def ask(self, key: str) -> None:
        """The cache is asked for a key; the first is the graph's."""
        if not self.key:
            # Other processes may write under the same key. What was there before is not this
            # compile's.
            self.key, self._before = key, set(_files(traced_entries_of(key)))

    def key_of_all_ranks(self) -> str:
        """Return what the key would be on any rank that has the graph, groups of the same names
        and meshes; "" if nothing says.
        """
        if self._key_again is None:
            return ""
        with keyed_by_rank(False), without_places():
            return self._key_again()

    def note(self, key_again: Callable[[], str]) -> None:
        """A key was made; ``key_again`` makes it anew. The first is the graph's."""
        self._key_again = self._key_again or key_again

    def made(self) -> bytes | None:
        """Return the entry that was written since; None if there is none."""
        if not self.key:
            return None
        folder = traced_entries_of(self.key)
        new = [name for name in _files(folder) if name not in self._before]
        try:
            # With several new files nobody knows which one is of this compile.
            return Path(folder, new[0]).read_bytes() if len(new) == 1 else None
        except OSError:
            return None


@contextlib.contextmanager
def traced_entries(missed: Callable[[TracedEntries], bool]) -> Iterator[TracedEntries]:
    """Note what AOTAutograd's cache is asked for in the block. ``missed``: whether to ask it again
    for what it does not have.

    ``AOTAutogradCache._lookup`` and ``autograd_cache_key`` were seen in 2.11 to 2.14.
    """
    from torch._functorch._aot_autograd import autograd_cache  # loads Inductor

    noted = TracedEntries()

    def looking_again(upstream: TorchFunction) -> TorchFunction:
        def lookup(key: str, *args: object, **kwargs: object) -> object:
            noted.ask(key)
            found = upstream(key, *args, **kwargs)
            return upstream(key, *args, **kwargs) if found is None and missed(noted) else found

        return lookup

    def noting(upstream: TorchFunction) -> TorchFunction:
        def make_key(*args: object, **kwargs: object) -> object:
            noted.note(lambda: str(upstream(*args, **kwargs)[0]))
            return upstream(*args, **kwargs)

        return make_key

    with (
        wrapped(autograd_cache.AOTAutogradCache, "_lookup", looking_again),
        wrapped(autograd_cache, "autograd_cache_key", noting),
    ):
        yield noted


def traced_entries_of(key: str) -> str:
    """Return the folder of a key in AOTAutograd's cache. ``_get_tmp_dir_for_key`` was seen in
    2.11 to 2.14.
    """
    # Loads Inductor.
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    return str(AOTAutogradCache._get_tmp_dir_for_key(key))


def _files(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if "." not in name)  # none half written
    except OSError:
        return []


def put_own_entry(key: str, entry: bytes, meshes: Mapping[str, DeviceMesh]) -> None:
    """Put an entry of another rank into the cache under this one's key, with this one's ``meshes``
    in it, by what they hold.

    Raises UnknownMeshError, OSError, and whatever a damaged entry makes of its own bytes.
    """
    with unpickled_as(meshes):
        # Unpickled and pickled again, because the entry holds meshes of the rank that made it:
        # coordinates are burnt into its graphs' guards.
        content = pickle.dumps(pickle.loads(entry))
    _write(traced_entries_of(key), content)
