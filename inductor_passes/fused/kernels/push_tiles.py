"""Tiles of a product, each pushed to the rank that owns its rows: by threads' copies, or by
descriptors.

A tile's flag is counted up when the next tile has been multiplied: its stores have arrived by then,
and the fence before the flag waits for nothing. Nothing here waits for a peer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import tiles
from inductor_passes.fused.kernels.tiles import tile_product

GROUP = tl.constexpr(8)


@triton.jit
def push_tile(
    acc: tl.tensor,
    peers_ptr: tl.tensor,
    owner: tl.tensor,
    pending: tl.tensor,
    rank: tl.tensor,
    half: tl.tensor,
    first_row: tl.tensor,
    first_col: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Signal the tile before to ``pending``, if there was one, and store this one at ``owner``."""
    if pending >= 0:
        dev.signal_add(dev.flags_of(peers_ptr, pending) + rank)
    part = dev.data_of(peers_ptr, owner, half, DTYPE) + rank.to(tl.int64) * M * N
    row = tl.arange(0, BM)
    col = tl.arange(0, BN)
    at = part + tl.cast(first_row, tl.int64) * N + first_col + row[:, None] * N + col[None, :]
    # Tiles at the end reach beyond the matrix: there the next rank's part begins.
    inside = (row < M - first_row)[:, None] & (col < N - first_col)[None, :]
    tl.store(at, acc.to(DTYPE), mask=inside)


@triton.jit
def push_tiles_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    b_row: tl.tensor,
    b_col: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """``M`` is the rows of each rank; a has ``WORLD * M``. Virtual ranks are axis 1 of the grid."""
    program = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    a_ptr += local * WORLD * M * K
    b_ptr += local * K * N
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    high = tl.cdiv(M, BM)
    wide = tl.cdiv(N, BN)
    per_rank = high * wide
    pending = rank * 0 - 1
    for t in tl.range(program, WORLD * per_rank, PROGRAMS, flatten=False):
        # Peers first, from the next rank on: each rank starts with another peer, which spreads the
        # load over links, and its own rows need no link at all.
        owner = (rank + 1 + t // per_rank) % WORLD
        m, n = tiles.tile_of(t % per_rank, high, wide, GROUP)
        first_row = m * BM
        first_col = n * BN
        acc = tile_product(
            a_ptr + (tl.cast(owner, tl.int64) * M + first_row) * K,
            b_ptr + tl.cast(first_col, tl.int64) * b_col,
            M - first_row,
            N - first_col,
            K,
            K,
            b_row,
            b_col,
            BM,
            BN,
            BK,
            EVEN,
            MODE,
        )
        push_tile(
            acc, peers_ptr, owner, pending, rank, half, first_row, first_col, M, N, BM, BN,
            a_ptr.dtype.element_ty,
        )  # fmt: skip
        pending = owner
    # The last tile of a program has no next one that would announce it.
    if pending >= 0:
        dev.signal_add(dev.flags_of(peers_ptr, pending) + rank)
    dev.finish(state_ptr, program, epoch)


@triton.jit
def push_tiles_tma_kernel(
    a_desc: tl.tensor_descriptor,
    b_desc: tl.tensor_descriptor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    B_ROWS_LIE: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """Compute the same with descriptors of a ``[ranks, WORLD, M, K]`` and b ``[ranks, K, N]``.

    Threads store the results. A bulk store could arrive after the flag that announces it.
    """
    program = tl.program_id(0)
    local = tl.program_id(1)
    state_ptr += local.to(tl.int64) * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    high = tl.cdiv(M, BM)
    wide = tl.cdiv(N, BN)
    theirs = (WORLD - 1) * high * wide
    pending = rank * 0 - 1
    for t in tl.range(program, WORLD * high * wide, PROGRAMS, flatten=False):
        if t < theirs:  # rows of several ranks share columns, where one has few
            r, n = tiles.tile_of(t, (WORLD - 1) * high, wide, GROUP)
        else:
            r, n = tiles.tile_of(t - theirs, high, wide, GROUP)
            r += (WORLD - 1) * high
        owner = (rank + 1 + r // high) % WORLD
        m = r % high
        acc = tiles.described_product(
            a_desc, b_desc, local, owner, local, m * BM, n * BN, K, BM, BN, BK, B_ROWS_LIE, MODE
        )
        push_tile(
            acc, peers_ptr, owner, pending, rank, half, m * BM, n * BN, M, N, BM, BN,
            a_desc.dtype,
        )  # fmt: skip
        pending = owner
    if pending >= 0:
        dev.signal_add(dev.flags_of(peers_ptr, pending) + rank)
    dev.finish(state_ptr, program, epoch)
