"""Rows of this rank to every peer, a chunk at a time, by a few programs of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import triton
import triton.language as tl

from inductor_passes.kernels import device as dev

MAX_CHUNKS = tl.constexpr(16)  # of one rank's rows
COPIERS = 16
# Elements that a program has in flight at once. On an H100 16 programs of 16 warps write 527 GB/s so, and of 8 warps
# with 8192 383 (tools/bench/results/gpu.json).
COPY_BLOCK = 32768
MAX_WEIGHTS = 3  # that share one gather
T = TypeVar("T")


def padded(values: Sequence[T]) -> list[T]:
    """One for each weight that a kernel takes: one that is not there repeats the first, and no tile of it is computed."""
    return [*values, *[values[0]] * (MAX_WEIGHTS - len(values))]


@triton.jit
def push_rows(
    a_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rank: tl.tensor,
    half: tl.tensor,
    epoch: tl.tensor,
    program: tl.tensor,
    n: tl.tensor,
    chunk_size: tl.tensor,
    chunks: tl.tensor,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Copy ``n`` elements to the place of this rank at every peer, ``chunk_size`` at a time.

    ``COPIERS`` programs share each chunk; the last to be done with it sets its flag. The peer that
    multiplies this rank's rows first is served first.
    """
    for step in range(1, WORLD):
        peer = (rank + WORLD - step) % WORLD
        target = dev.data_of(peers_ptr, peer, half, DTYPE) + rank.to(tl.int64) * n
        for chunk in range(chunks):
            first = tl.cast(chunk, tl.int64) * chunk_size
            last = tl.minimum(first + chunk_size, n)
            for start in range(first + program * BLOCK, last, COPIERS * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(a_ptr + at, mask=at < last), mask=at < last)
            tl.debug_barrier()
            counter = state_ptr + dev.COUNTERS + peer * MAX_CHUNKS + chunk
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
            if arrived == COPIERS:
                tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                dev.signal(dev.flags_of(peers_ptr, peer) + rank * MAX_CHUNKS + chunk, epoch)
