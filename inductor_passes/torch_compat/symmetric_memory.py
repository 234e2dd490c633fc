"""Symmetric memory."""

from __future__ import annotations

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

    A collective: every rank of the group calls it alike. ``empty``, ``rendezvous`` and ``get_buffer`` were
    seen in torch 2.11 to 2.15. Raises RuntimeError where peers cannot map each other's memory.
    """
    from torch.distributed import _symmetric_memory as symm

    private: Any = symm
    mine = private.empty(nbytes, dtype=torch.uint8, device=device)
    mine.zero_()
    handle = private.rendezvous(mine, group_name)
    torch.cuda.synchronize(device)
    handle.barrier(channel=0)  # nobody signals into a buffer that its owner is still zeroing
    peers = [handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(handle.world_size)]
    peers[handle.rank] = mine
    return peers, int(handle.rank), handle
