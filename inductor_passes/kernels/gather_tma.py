"""The kernel of ``all_gather_matmul`` for Hopper and later: tiles by descriptors, handed out by a counter.

The first programs push this rank's rows to every peer, as in ``all_gather_matmul.py``; then they multiply with
the others. Tiles of this rank's rows come first, then those of the peers in the order in which they come in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inductor_passes.kernels import device as dev
from inductor_passes.kernels import tma
from inductor_passes.kernels.gather_rows import COPIERS, COPY_BLOCK, MAX_CHUNKS, push_rows
from inductor_passes.kernels.tiles import Tiles, activate
from inductor_passes.kernels.workspace import Workspace

# Row tiles that are multiplied with one column tile before the next. Many share more in the cache: 0.96 of cuBLAS
# with 4, 0.98 with 8 on an H100; few let tiles begin when the first rows of a rank have come.
GROUP = 8
GROUP_OF_FEW = 4
# Columns from which a product takes longer than its gather: operations for each byte of NVLink 4 and an H100.
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
    per_rank = high * wide
    counter = dev.open_counter(state_ptr, program, parity)
    # The first tiles are those who do not copy take; no tile is taken before it is begun: who holds one too many
    # is waited for at the end.
    given = tl.num_programs(0) - COPIERS
    t = program - COPIERS
    if t < 0:
        t = given + dev.take(counter)
    while t < WORLD * per_rank:
        source = (rank + t // per_rank) % WORLD
        m, n = tma.tile_of(t % per_rank, high, wide, GROUP)
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
            half = parity + tma.fence(parity * 0, MODE)
            poison = tl.where(ok, 0.0, float("nan"))
        b_desc = b0_desc
        c_desc = c0_desc
        bias_ptr = bias0_ptr
        N = N0
        col = n * BN
        if WEIGHTS > 1:
            if n >= wide0:
                b_desc = b1_desc
                c_desc = c1_desc
                bias_ptr = bias1_ptr
                N = N1
                col = (n - wide0) * BN
        if WEIGHTS > 2:
            if n >= wide1:
                b_desc = b2_desc
                c_desc = c2_desc
                bias_ptr = bias2_ptr
                N = N2
                col = (n - wide1) * BN
        acc = tma.tile_product(
            rows, b_desc, local, half, 0, first_row, col, K, BM, BN, BK, B_ROWS_LIE, MODE
        )
        # In two halves: shared memory holds no whole tile beside four stages.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        out = local * WORLD + source
        _store(left, bias_ptr, c_desc, out, row, col, N, poison, ACTIVATION, a_ptr.dtype.element_ty)
        col += BN // 2
        _store(
            right, bias_ptr, c_desc, out, row, col, N, poison, ACTIVATION, a_ptr.dtype.element_ty
        )
        t = given + dev.take(counter)
    dev.finish(state_ptr, program, epoch)


def launch(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    workspace: Workspace,
    *,
    activation: str,
    tiles: Tiles,
    copiers: int = COPIERS,
    copy_block: int = COPY_BLOCK,
    group: int | None = None,
) -> None:
    """Run the kernel on what ``tma.can_describe`` accepts; ``outs`` are written."""
    ranks, world = workspace.local_ranks, workspace.world
    m, k = a.shape[0] // ranks, a.shape[1]
    block = (1, 1, tiles.m, tiles.k)
    gathered, rank_stride, half_stride = workspace.gathered(a.dtype)
    missing = 3 - len(
        weights
    )  # a weight that is not there repeats the first: no tile of it is computed

    def results(out: torch.Tensor) -> TensorDescriptor:
        n = out.shape[1]
        return tma.describe(out, (ranks * world, m, n), (m * n, n, 1), (1, tiles.m, tiles.n // 2))

    described = [tma.describe_weight(weight, tiles) for weight in weights]
    stored = [results(out) for out in outs]
    given = [*biases] or [None] * len(weights)
    widths = [weight.shape[1] for weight in weights]
    all_gather_matmul_tma_kernel[(workspace.programs, ranks)](
        a,
        tma.describe(a, (ranks, 1, m, k), (m * k, m * k, k, 1), block),
        tma.describe(
            gathered, (ranks, 2, world * m, k), (rank_stride, half_stride, k, 1), block
        ),
        *described, *described[:1] * missing,
        *given, *given[:1] * missing,
        *stored, *stored[:1] * missing,
        workspace.peers,
        workspace.state,
        m,
        *widths, *widths[:1] * missing,
        k,
        workspace.half_bytes,
        triton.cdiv(triton.cdiv(m, tiles.m), MAX_CHUNKS.value),
        WORLD=world,
        COPIERS=copiers,
        COPY_BLOCK=copy_block,
        WEIGHTS=len(weights),
        ACTIVATION=activation,
        BM=tiles.m,
        BN=tiles.n,
        BK=tiles.k,
        GROUP=group or (GROUP if sum(widths) >= MANY_COLUMNS else GROUP_OF_FEW),
        B_ROWS_LIE=tma.rows_lie(weights[0]),
        MODE=workspace.mode,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_cooperative_grid=ranks > 1,
    )  # fmt: skip
