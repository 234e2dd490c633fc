"""The kernel of ``all_gather_matmul`` for Hopper and later: tiles by descriptors, handed out by a
counter.

The first programs push this rank's rows to every peer, as in ``all_gather_matmul.py``; then they
multiply with the others. Tiles of this rank's rows come first, then those of the peers in the order
in which they come in. Programs that push wait for nothing until they have, so a launch that is not
resident as a whole still ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.tiles import Tiles, activate
from inductor_passes.fused.kernels.workspace import Workspace

MAX_CHUNKS = tl.constexpr(16)  # of one rank's rows
COPIERS = 16
# Elements that a program has in flight at once. On an H100 16 programs of 16 warps write 527 GB/s
# so, and of 8 warps with 8192 383 (tools/bench/results/gpu.json).
COPY_BLOCK = 32768
MAX_WEIGHTS = 3  # that share one gather
T = TypeVar("T")


def padded(values: Sequence[T]) -> list[T]:
    """One for each weight that a kernel takes: one that is not there repeats the first, and no
    tile of it is computed.
    """
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
    # Rank r - 1 multiplies r's rows right after its own, so it is served first. At any time all
    # ranks send to different peers.
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
            # Acquire and release: the last program to arrive must see the stores of the others
            # before it announces all of them.
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
            if arrived == COPIERS:
                # For the next call, which no program of this rank begins before this kernel has
                # ended.
                tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                dev.signal(dev.flags_of(peers_ptr, peer) + rank * MAX_CHUNKS + chunk, epoch)


# Row tiles that are multiplied with one column tile before the next. Many share more in the cache;
# few let tiles begin when the first rows of a rank have come.
GROUP = 8
GROUP_OF_FEW = 4
# Columns from which a product takes longer than its gather: operations for each byte of NVLink 4
# and an H100.
MANY_COLUMNS = 1700


@triton.jit
def _store(
    acc: tl.tensor,
    bias_ptr: tl.tensor,
    c_desc: tl.tensor_descriptor,
    out: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    N: tl.tensor,
    poison: tl.tensor,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    if bias_ptr is not None:
        cols = col + tl.arange(0, acc.shape[1])
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    # Adding 0 changes no number but -0.0, and adding NaN poisons all. A branch on ``ok`` would cost
    # registers in every tile.
    acc = (activate(acc, ACTIVATION) + poison).to(DTYPE)
    c_desc.store([out, row, col], acc.reshape(1, acc.shape[0], acc.shape[1]))


@triton.jit
def all_gather_matmul_tma_kernel(
    a_ptr: tl.tensor,
    a_desc: tl.tensor_descriptor,
    rows_desc: tl.tensor_descriptor,
    b0_desc: tl.tensor_descriptor,
    b1_desc: tl.tensor_descriptor,
    b2_desc: tl.tensor_descriptor,
    half0_desc: tl.tensor_descriptor,
    half1_desc: tl.tensor_descriptor,
    half2_desc: tl.tensor_descriptor,
    bias0_ptr: tl.tensor,
    bias1_ptr: tl.tensor,
    bias2_ptr: tl.tensor,
    c0_desc: tl.tensor_descriptor,
    c1_desc: tl.tensor_descriptor,
    c2_desc: tl.tensor_descriptor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    M: tl.tensor,
    N0: tl.tensor,
    N1: tl.tensor,
    N2: tl.tensor,
    K: tl.tensor,
    half_bytes: tl.tensor,
    chunk_tiles: tl.tensor,
    whole: tl.tensor,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    B_ROWS_LIE: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """``M`` rows of this rank; c has ``WORLD * M``. A chunk is ``chunk_tiles`` tiles high.

    The first ``whole`` tiles are multiplied whole, the others in halves of ``BN // 2`` columns
    each.

    Virtual ranks are axis 1 of the grid; their a and c lie end to end, weights are shared.
    """
    program = tl.program_id(0)
    local = tl.program_id(1)
    state_ptr += local.to(tl.int64) * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    parity = epoch & 1
    high = tl.cdiv(M, BM)
    if program < COPIERS:
        push_rows(
            a_ptr + local.to(tl.int64) * M * K,
            peers_ptr,
            state_ptr,
            rank,
            tl.cast(parity, tl.int64) * half_bytes,
            epoch,
            program,
            tl.cast(M, tl.int64) * K,
            tl.cast(chunk_tiles, tl.int64) * BM * K,
            tl.cdiv(high, chunk_tiles),
            WORLD,
            COPIERS,
            COPY_BLOCK,
            a_ptr.dtype.element_ty,
        )
    wide0 = tl.cdiv(N0, BN)
    wide1 = wide0
    wide = wide0
    if WEIGHTS > 1:
        wide1 = wide0 + tl.cdiv(N1, BN)
        wide = wide1
    if WEIGHTS > 2:
        wide = wide1 + tl.cdiv(N2, BN)
    flags = dev.flags_of(peers_ptr, rank)
    own = high * wide
    units = 2 * WORLD * own - whole
    counter = dev.open_counter(state_ptr, program, parity)
    # The first tiles are those who do not copy take; no tile is taken before it is begun: who holds
    # one too many is waited for at the end.
    given = tl.num_programs(0) - COPIERS
    unit = program - COPIERS
    if unit < 0:
        unit = given + dev.take(counter)
    while unit < units:
        t = tl.where(unit < whole, unit, whole + (unit - whole) // 2)
        if t < own:
            r, n = tma.tile_of(t, high, wide, GROUP)
        else:  # rows of several ranks share columns, where one has few
            r, n = tma.tile_of(t - own, (WORLD - 1) * high, wide, GROUP)
            r += high
        source = (rank + r // high) % WORLD
        m = r % high
        row = m * BM
        # One loop over K for all: each would have its own stages of shared memory.
        rows = a_desc
        first_row = row
        half = 0
        poison = 0.0
        if source != rank:
            chunk = m // chunk_tiles
            flag = flags + source * MAX_CHUNKS + chunk
            ok = dev.flag_wait(flag, epoch, 1, source, chunk, state_ptr, MODE)
            rows = rows_desc
            first_row = source * M + row
            # Descriptors load through the asynchronous proxy: without the fence they could see
            # memory as it was before the flag. The fence returns 0, so that the load depends on it.
            half = parity + tma.fence(parity * 0, MODE)
            poison = tl.where(ok, 0.0, float("nan"))
        b_desc = b0_desc
        half_desc = half0_desc
        c_desc = c0_desc
        bias_ptr = bias0_ptr
        N = N0
        col = n * BN
        if WEIGHTS > 1:
            if n >= wide0:
                b_desc = b1_desc
                half_desc = half1_desc
                c_desc = c1_desc
                bias_ptr = bias1_ptr
                N = N1
                col = (n - wide0) * BN
        if WEIGHTS > 2:
            if n >= wide1:
                b_desc = b2_desc
                half_desc = half2_desc
                c_desc = c2_desc
                bias_ptr = bias2_ptr
                N = N2
                col = (n - wide1) * BN
        out = local * WORLD + source
        DTYPE: tl.constexpr = a_ptr.dtype.element_ty
        if unit < whole:
            acc = tma.described_product(
                rows, b_desc, local, half, 0, first_row, col, K, BM, BN, BK, B_ROWS_LIE, MODE
            )
            # In two halves: shared memory holds no whole tile beside four stages.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            _store(left, bias_ptr, c_desc, out, row, col, N, poison, ACTIVATION, DTYPE)
            _store(right, bias_ptr, c_desc, out, row, col + BN // 2, N, poison, ACTIVATION, DTYPE)
        else:
            col += (unit - whole) % 2 * (BN // 2)
            part = tma.described_product(
                rows,
                half_desc,
                local,
                half,
                0,
                first_row,
                col,
                K,
                BM,
                BN // 2,
                BK,
                B_ROWS_LIE,
                MODE,
            )
            _store(part, bias_ptr, c_desc, out, row, col, N, poison, ACTIVATION, DTYPE)
        unit = given + dev.take(counter)
    dev.finish(state_ptr, program, epoch)


def copiers_for(widths: Sequence[int]) -> int:
    """Programs that push rows: more where the link takes longer than the product, which has time
    for theirs.
    """
    return COPIERS if sum(widths) >= MANY_COLUMNS else 2 * COPIERS


def launch(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    workspace: Workspace,
    *,
    activation: str,
    tiles: Tiles,
    copiers: int | None,
    copy_block: int,
) -> None:
    """Run the kernel on what ``tma.can_describe`` accepts; ``outs`` are written."""
    ranks, world = workspace.local_ranks, workspace.world
    m, k = a.shape[0] // ranks, a.shape[1]
    block = (1, 1, tiles.m, tiles.k)
    gathered, rank_stride, half_stride = workspace.gathered(a.dtype)

    def results(out: torch.Tensor) -> TensorDescriptor:
        n = out.shape[1]
        return tma.describe(out, (ranks * world, m, n), (m * n, n, 1), (1, tiles.m, tiles.n // 2))

    described = [tma.describe_weight(weight, tiles) for weight in weights]
    # A descriptor has one block size: tiles and half tiles each need their own.
    narrow = dataclasses.replace(tiles, n=tiles.n // 2)
    halves = [tma.describe_weight(weight, narrow) for weight in weights]
    stored = [results(out) for out in outs]
    widths = [weight.shape[1] for weight in weights]
    all_gather_matmul_tma_kernel[(workspace.programs, ranks)](
        a,
        tma.describe(a, (ranks, 1, m, k), (m * k, m * k, k, 1), block),
        tma.describe(gathered, (ranks, 2, world * m, k), (rank_stride, half_stride, k, 1), block),
        *padded(described),
        *padded(halves),
        *padded(biases or [None]),
        *padded(stored),
        workspace.peers,
        workspace.state,
        m,
        *padded(widths),
        k,
        workspace.half_bytes,
        # Whole tiles to a chunk, so that each tile waits for one flag.
        triton.cdiv(triton.cdiv(m, tiles.m), MAX_CHUNKS.value),
        tma.whole_tiles(m, widths, world, workspace.programs, tiles),
        WORLD=world,
        COPIERS=copiers_for(widths) if copiers is None else copiers,
        COPY_BLOCK=copy_block,
        WEIGHTS=len(weights),
        ACTIVATION=activation,
        BM=tiles.m,
        BN=tiles.n,
        BK=tiles.k,
        GROUP=GROUP if sum(widths) >= MANY_COLUMNS else GROUP_OF_FEW,
        B_ROWS_LIE=tma.rows_lie(weights[0]),
        MODE=workspace.mode,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        # Virtual ranks wait for each other inside one launch: all their programs must be resident,
        # or the launch has to fail.
        launch_cooperative_grid=ranks > 1,
    )
