"""Process groups: ranks, devices, the job's store, symmetric memory."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

# ``Any``: torch exports none of their private names, and mypy would refuse each of them.
_python_c10d: Any = distributed_c10d
_native_c10d: Any = _distributed_c10d


def has_symmetric_memory() -> bool:
    """Return whether this torch can allocate memory that peers map. Seen in 2.11 to 2.15, CUDA
    builds.
    """
    if not torch.cuda.is_available():
        return False
    try:
        # Its import defines operators, and a build without CUDA may lack parts of it.
        from torch.distributed import _symmetric_memory as symm
    except ImportError:
        return False
    return hasattr(symm, "empty") and hasattr(symm, "rendezvous")


def process_group(group_name: str) -> object:
    """The group of that name; None if there is none. Seen in 2.11 to 2.15."""
    try:
        return _python_c10d._resolve_process_group(group_name)
    except (RuntimeError, ValueError, LookupError):
        return None


def symmetric_buffers(
    nbytes: int, group_name: str, device: torch.device
) -> tuple[list[torch.Tensor], int, object]:
    """Return every rank's zeroed uint8 buffer, mapped here; this rank; and the mapping's owner.

    The mapping lives as long as the last value. This is a collective: every rank of the group calls
    it in the same way. It runs in a thread and on a stream of its own: while Inductor warms up for
    a CUDA graph, what this thread allocates on its stream is the graph's. Raises RuntimeError where
    peers cannot map each other's memory.
    """
    with ThreadPoolExecutor(1, "symmetric-memory") as thread:
        return thread.submit(_allocate, nbytes, group_name, device).result()


def _allocate(
    nbytes: int, group_name: str, device: torch.device
) -> tuple[list[torch.Tensor], int, object]:
    """``empty``, ``rendezvous``, ``barrier`` and ``get_buffer`` were seen in torch 2.11 to 2.15."""
    from torch.distributed import _symmetric_memory as symm  # defines operators

    private: Any = symm
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        mine = private.empty(nbytes, dtype=torch.uint8, device=device)
        mine.zero_()
        handle = private.rendezvous(mine, group_name)
        torch.cuda.current_stream().synchronize()
        handle.barrier(channel=0)  # nobody signals into a buffer that its owner is still zeroing
        torch.cuda.current_stream().synchronize()
    return peer_buffers(handle, mine), int(handle.rank), handle


def peer_buffers(handle: Any, mine: torch.Tensor) -> list[torch.Tensor]:
    """What every rank has where this rank has ``mine``, a uint8 tensor of one dimension.

    ``get_remote_tensor`` minds where in its segment a tensor lies; ``get_buffer``, all there was
    before, counts from the segment's start. Raises RuntimeError where this rank's own is not found
    at its address.
    """
    size = (mine.numel(),)
    if hasattr(handle, "get_remote_tensor"):
        peers = [handle.get_remote_tensor(r, size, torch.uint8) for r in range(handle.world_size)]
    else:
        offset = mine.data_ptr() - int(handle.buffer_ptrs[handle.rank])
        peers = [handle.get_buffer(r, size, torch.uint8, offset) for r in range(handle.world_size)]
    if peers[handle.rank].data_ptr() != mine.data_ptr():
        raise RuntimeError(
            f"Symmetric memory of rank {handle.rank} was found at "
            f"{peers[handle.rank].data_ptr():#x}, and is at "
            f"{mine.data_ptr():#x}. This torch maps it in a way that is not known here. Leave "
            "fused kernels out with "
            "options={'fuse': False}, and please report it."
        )
    peers[handle.rank] = mine
    return peers


def group_size_of(group_name: str) -> int:
    """Ranks in a registered process group; 0 if there is none of that name. Seen in 2.11 to
    2.15.
    """
    try:
        return int(_python_c10d._get_group_size_by_name(group_name))
    except (RuntimeError, ValueError, LookupError):
        return 0


def group_device_types(group_name: str) -> frozenset[str] | None:
    """Device types that a registered group's backends serve; None if there is no such group.

    Empty where the group does not say. Seen in 2.11 to 2.15.
    """
    group: Any = process_group(group_name)
    if group is None:
        return None
    try:
        return frozenset(device.type for device in group._device_types)
    except (AttributeError, RuntimeError):
        return frozenset()


def group_ranks(group: object) -> tuple[int, ...] | None:
    """Global ranks of a group given by name or as an object; None if this process does not know it.

    Accepts the stand-in that tracing makes of a group. ``real_obj`` was seen in 2.11 to 2.15.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = getattr(group, "real_obj", group)
    try:
        if isinstance(group, str):
            group = process_group(group)
        if isinstance(group, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(group))
    except (LookupError, RuntimeError, ValueError):
        return None  # a group already destroyed
    return None


# Backends whose ranks are one process: what one of them compiles, all have.
_OF_ONE_PROCESS = frozenset(("fake", "threaded", "timed", "timed_cuda"))


def default_group() -> Any:
    """The default process group; None where none is initialised. Seen in 2.11 to 2.15."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def reads_default_group() -> Callable[[], Any]:
    """Return a getter of the default process group without the checks of ``default_group``: each
    call asks it.

    ``_world.default_pg`` was seen in 2.11 to 2.15.
    """
    world = _python_c10d._world
    # ``_world`` itself stays the same for the life of a process; its default group changes.
    return lambda: world.default_pg


def moves_data(group: object) -> bool:
    """Return whether a group's ranks are processes of their own."""
    if group is None:
        return False
    try:
        return dist.get_backend(cast(Any, group)) not in _OF_ONE_PROCESS
    except (RuntimeError, ValueError):
        return False


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str | bytes) -> object: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> object: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


# The default group of the process that this one was forked from, if it had one.
_parents_group: object = None


def _after_fork() -> None:
    global _parents_group  # noqa: PLW0603 - of this process from here on
    _parents_group = default_group()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def job_store() -> Store | None:
    """The default group's store; None without a group, or where all ranks are one process.

    None too where the group is that of a process that forked this one: both would talk to the store
    at once over one connection, and read each other's answers. ``_get_default_store`` was seen in
    2.11 to 2.15.
    """
    group = default_group()
    if group is None or group is _parents_group or not moves_data(group):
        return None
    get_store = getattr(_python_c10d, "_get_default_store", None)
    return None if get_store is None else cast(Store, get_store())


def own_connection(store: Store) -> Store:
    """Return a store with a connection of its own, for another thread; itself where it has none.

    ``clone`` was seen in 2.11 to 2.15.
    """
    clone: Any = getattr(store, "clone", None)
    return store if clone is None else cast(Store, clone())


def has_many(store: Store) -> bool:
    """Return whether a store reads and writes several keys at once. Seen in 2.11 to 2.15."""
    return bool(getattr(store, "has_extended_api", lambda: False)())


def global_rank() -> int:
    """This process's rank in the job."""
    return dist.get_rank()


def real_group_ranks(name: str) -> tuple[int, ...] | None:
    """Global ranks of a group that moves data between processes, by name; None for any other."""
    group = process_group(name)
    return group_ranks(group) if moves_data(group) else None


def real_groups() -> dict[str, tuple[int, ...]]:
    """Name and ranks of every group of this process that moves data to others."""
    return {
        name: ranks
        for name, ranks in known_groups().items()
        if len(ranks) > 1 and real_group_ranks(name) is not None
    }


def known_groups() -> dict[str, tuple[int, ...]]:
    """Name and global ranks of every group that this process has made. Seen in 2.11 to 2.15."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    ranks = _python_c10d._world.pg_group_ranks
    return {
        name: tuple(ranks[group])
        for group, name in _python_c10d._world.pg_names.items()
        if group in ranks
    }


# Names by which all ranks call a group, by the name that it has in this process; of the default
# group in ``_named``.
_common: dict[str, str] = {}
_named: list[object] = []


def common_name(name: str) -> str:
    """Return a name of a group that is the same on all ranks that make their groups in one order;
    its own if there is none.

    torch counts all groups of the job, so that the rows of a mesh are called otherwise on each
    rank. Here a process counts the groups that it is in, in the order in which it made them, and
    registers each under that name too: in this process a name stands for one group, whatever other
    ranks do. ``_register_process_group`` was seen in 2.11 to 2.14.
    """
    group = default_group()
    if group is None or not _is_one_rank_a_process(group):
        return name
    # The default group is a new one: names are of a job before in this process, as in tests.
    if not _named or _named[0] is not group:
        _common.clear()
        _named[:] = [group]
    if name not in _common:
        for each, own in list(_python_c10d._world.pg_names.items()):
            # Groups in the order in which this process made them, so that two ranks that made
            # theirs in one order count alike.
            if own not in _common:
                _common[own] = own if each is group else _register(each, len(_common))
    return _common.get(name, name)


def _is_one_rank_a_process(group: Any) -> bool:
    """Return whether a name that torch knows is one rank's: ranks that are threads of one
    process have their names together.
    """
    return moves_data(group) or dist.get_backend(group) == "fake"


def name_in_graphs(name: str) -> str:
    """Return the name that ``common_name`` has given to a group in this process; its own if it
    has given none.
    """
    return _common.get(name, name)


def own_name(name: str) -> str:
    """Inverse of ``common_name`` in this process."""
    return next((own for own, common in _common.items() if common == name), name)


def _register(group: Any, number: int) -> str:
    name = f"inductor_passes_group_{number}"
    with contextlib.suppress(RuntimeError, ValueError, LookupError):
        _native_c10d._unregister_process_group(name)  # of a job before in this process
    _native_c10d._register_process_group(name, group)
    return name


def world_size() -> int | None:
    """Ranks of the job, or None where no process group is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def init_fake_group(world_size: int, rank: int) -> None:
    """Initialise the default process group on fake ranks. Seen in 2.11 to 2.15."""
    # Its import registers the backend "fake": only who asks for fake ranks gets it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
