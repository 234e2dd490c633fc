"""Entries of torch's compile caches that this process has made or used, and the way back into a cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from dynamo_dist.torch_compat.inductor import units
from dynamo_dist.torch_compat.inductor.code import cache_dir

# Of torch's kinds. Profiles of dynamic sizes are none of ours: with them a second job would trace other graphs than the first.
_OF_TORCH = ("aot_autograd", "inductor", "autotune")
FILE = "file"  # one beside the cache
FRAME = "frame"  # what Dynamo made of a frame: of this process, in no cache
KINDS = (*_OF_TORCH, FILE, FRAME)
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. ``name``: torch's key of it; for a file, its path in Inductor's cache folder, with slashes."""

    kind: str
    name: str
    content: bytes


def recorded() -> list[Entry]:
    """Entries that torch has recorded since the process began, made and found ones. ``_seen_artifacts`` was seen in 2.11 to 2.14.

    ``torch.compiler.save_cache_artifacts`` forgets all but the last of what was serialised in several goes.
    """
    from torch.compiler._cache import CacheArtifactManager

    seen = getattr(CacheArtifactManager, "_seen_artifacts", ())
    return [Entry(each.type(), each.key, each.content) for each in seen if each.type() in _OF_TORCH]


def files(names: Iterable[str]) -> list[Entry]:
    """Files of Inductor's cache folder: ``names``, the libraries that this process has loaded and where in them kernels are, verdicts of vector units."""
    folder = Path(cache_dir())
    trials = folder / "dynamo_dist" / "vector_units"
    tried = trials.iterdir() if trials.is_dir() else ()
    found = (*_libraries(folder), *units.index_names(), *(_name(path, folder) for path in tried))
    wanted = {*names, *found}
    return [
        Entry(FILE, name, (folder / name).read_bytes())
        for name in sorted(wanted)
        if (folder / name).is_file()
    ]


def put(entries: Iterable[Entry]) -> None:
    """Put entries into the caches of this process. Raises OSError, and ValueError for a name that leaves the cache folder.

    ``CacheArtifactFactory.create`` and ``populate_cache`` were seen in 2.11 to 2.14.
    """
    from torch._inductor.codecache import write_atomic
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    entries = [each for each in entries if each.kind != FRAME]
    for each in entries:
        _check(each.name)
    CacheArtifactManager._ensure_cache_artifacts_registered()
    for each in entries:
        if each.kind != FILE:
            CacheArtifactFactory.create(each.kind, each.name, each.content).populate_cache()
            continue
        target = Path(cache_dir(), each.name)
        if not target.is_file() or target.read_bytes() != each.content:
            write_atomic(str(target), each.content, make_dirs=True)


def off() -> str:
    """Return the switch by which torch's caches on disk are off; "" if they are on. The switches were seen in 2.11 to 2.14."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    switches = (
        ("force_disable_caches", not getattr(inductor, "force_disable_caches", False)),
        ("fx_graph_cache", getattr(inductor, "fx_graph_cache", True)),
        ("enable_autograd_cache", getattr(functorch, "enable_autograd_cache", True)),
    )
    return next((name for name, is_on in switches if not is_on), "")


def misses() -> int:
    """How often this process has not found a graph in AOTAutograd's or Inductor's cache."""
    counted = torch._dynamo.utils.counters
    return int(
        counted["aot_autograd"]["autograd_cache_miss"] + counted["inductor"]["fxgraph_cache_miss"]
    )


def bypassed() -> int:
    """Graphs of this process that AOTAutograd's cache does not keep."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_bypass"])


def _libraries(folder: Path) -> Iterator[str]:
    """C++ kernels that are mapped into this process. Elsewhere than on Linux none: they are built anew."""
    root = os.path.realpath(folder)
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if path.startswith(f"{root}{os.sep}") and path.endswith(".so"):
            yield _name(Path(path), Path(root))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _check(name: str) -> None:
    parts = PurePosixPath(name)
    if not name or parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise ValueError(f"the entry {name!r} lies outside the cache folder")
