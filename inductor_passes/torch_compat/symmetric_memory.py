"""Symmetric memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def has_symmetric_memory() -> bool:
    """Return whether this torch can allocate memory that peers map. Seen in 2.11 to 2.15, CUDA builds."""
    if not torch.cuda.is_available():
        return False
    try:
        from torch.distributed import _symmetric_memory as symm
    except ImportError:
        return False
    return hasattr(symm, "empty") and hasattr(symm, "rendezvous")


def process_group(group_name: str) -> object:
    """The group of that name; None if there is none. Seen in 2.11 to 2.15."""
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported
    try:
        return resolve(group_name)
    except (RuntimeError, ValueError, KeyError, LookupError):
        return None


def symmetric_buffers(
    nbytes: int, group_name: str, device: torch.device
) -> tuple[list[torch.Tensor], int, object]:
    """A zeroed uint8 buffer of every rank of the group, mapped here; this rank; and what keeps the mapping.

    A collective: every rank of the group calls it alike. It runs in a thread and on a stream of its own: while
    Inductor warms up for a CUDA graph, what this thread allocates on its stream is the graph's. Raises RuntimeError
    where peers cannot map each other's memory.
    """
    with ThreadPoolExecutor(1, "symmetric-memory") as thread:
        return thread.submit(_allocate, nbytes, group_name, device).result()


def _allocate(
    nbytes: int, group_name: str, device: torch.device
) -> tuple[list[torch.Tensor], int, object]:
    """``empty``, ``rendezvous``, ``barrier`` and ``get_buffer`` were seen in torch 2.11 to 2.15."""
    from torch.distributed import _symmetric_memory as symm

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

    ``get_remote_tensor`` minds where in its segment a tensor lies; ``get_buffer``, all there was before, counts from
    the segment's start. Raises RuntimeError where this rank's own is not found at its address.
    """
    size = (mine.numel(),)
    if hasattr(handle, "get_remote_tensor"):
        peers = [handle.get_remote_tensor(r, size, torch.uint8) for r in range(handle.world_size)]
    else:
        offset = mine.data_ptr() - int(handle.buffer_ptrs[handle.rank])
        peers = [handle.get_buffer(r, size, torch.uint8, offset) for r in range(handle.world_size)]
    if peers[handle.rank].data_ptr() != mine.data_ptr():
        raise RuntimeError(
            f"Symmetric memory of rank {handle.rank} was found at {peers[handle.rank].data_ptr():#x}, and is at "
            f"{mine.data_ptr():#x}. This torch maps it in a way that is not known here. Leave fused kernels out with "
            "options={'fuse': False}, and please report it."
        )
    peers[handle.rank] = mine
    return peers
