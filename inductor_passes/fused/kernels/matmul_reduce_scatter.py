"""``inductor_passes::matmul_reduce_scatter``: partial products, summed over ranks, each rank's rows
to it.

Two launches. The first computes tiles, those of the peers' rows before its own, and pushes each to
the rank that owns its rows as soon as it is done, counting up a flag there. The second waits for
the count of every rank and adds the parts in the order of ranks, in float32, at the speed of
memory. Parts travel in the type of the result. The first waits for nothing, so the second's waits
always end: with the sum at the end of the first, its programs could keep a peer's library from
multiprocessors that it waits for in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.push_tiles import push_tiles_kernel, push_tiles_tma_kernel
from inductor_passes.fused.kernels.tiles import (
    Tiles,
    capability_of,
    mode_of,
    multiprocessors,
    tiles_for,
)
from inductor_passes.fused.kernels.workspace import Workspace, find_workspace

FAMILY = "matmul_reduce_scatter"
REDUCE_OPS = ("sum", "avg")
BLOCK = 2048
MOST_PROGRAMS = 1024  # of the reduction: words in which it keeps its counts
# Flags count tiles, and a peer may be in its next call: more tiles than any call has.
AHEAD = tl.constexpr(1 << 24)
c10d = torch.ops._c10d_functional


@triton.jit
def add_chunks(
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    n: tl.tensor,
    factor: tl.tensor,
    COUNT: tl.constexpr,
) -> None:
    """Elements ``at`` of ``COUNT`` chunks of ``n`` elements each: their sum times ``factor``."""
    n = tl.cast(n, tl.int64)
    # In the order of ranks, in float32: each rank's result has the bits that one device would get
    # from the same parts.
    total = tl.load(chunks_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for chunk in tl.static_range(1, COUNT):
        part = tl.load(chunks_ptr + chunk * n + at, mask=mask, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + at, (total * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_parts_kernel(
    out_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    n: tl.tensor,
    tiles: tl.tensor,
    factor: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """Add the ``n`` elements that each rank has pushed here, once all its ``tiles`` have come.

    How far the flags had counted before is kept for each program, as an epoch is.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    out_ptr += local * n
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = tl.load(state_ptr + dev.EPOCHS)  # of the push before, which has stored it
    # Flags count tiles over all calls and are never reset, so that a peer in its next call cannot
    # race with a reset.
    expect = tl.load(state_ptr + dev.COUNTERS + program) + tiles
    flags = dev.flags_of(peers_ptr, rank)
    lane = tl.arange(0, dev.MOST_RANKS)
    ok = dev.wait_for_all(flags + lane, lane < WORLD, expect, AHEAD, 0, state_ptr, MODE)
    # Parts that never came would be the sums of an earlier call: NaN is noticed, old numbers are
    # not.
    factor = tl.where(ok, factor, float("nan"))
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    parts_ptr = dev.data_of(peers_ptr, rank, half, DTYPE)
    for block in range(program, tl.cdiv(n, BLOCK), PROGRAMS):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        add_chunks(parts_ptr, out_ptr, at, at < n, n, factor, WORLD)
    tl.debug_barrier()
    # After the barrier, because all threads of the program read the old count.
    tl.store(state_ptr + dev.COUNTERS + program, expect)


def launch_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    workspace: Workspace,
    *,
    average: bool,
    tiles: Tiles,
    block: int = BLOCK,
    descriptors: bool = False,
) -> torch.Tensor:
    """Run both kernels. ``a`` contiguous ``[rows, K]``, ``b`` ``[K, N]``; those of virtual ranks
    stacked.

    ``descriptors`` moves operands by the tensor memory accelerator: for what ``tma.can_describe``
    accepts.
    """
    m, n = a.shape[0] // workspace.world, b.shape[1]
    out = a.new_empty(m, n)
    push(a, b, workspace, tiles=tiles, descriptors=descriptors)
    # Tiles that one rank pushes to another: what each flag has to count up to.
    count = triton.cdiv(m // workspace.local_ranks, tiles.m) * triton.cdiv(n, tiles.n)
    add_parts(out, workspace, tiles=count, average=average, block=block)
    return out


def push(
    a: torch.Tensor, b: torch.Tensor, workspace: Workspace, *, tiles: Tiles, descriptors: bool
) -> None:
    """Run the first kernel: tiles to the ranks that own their rows."""
    ranks, world = workspace.local_ranks, workspace.world
    m, k, n = a.shape[0] // ranks // world, a.shape[1], b.shape[1]
    sizes = (workspace.peers, workspace.state, m, n, k)
    how: dict[str, Any] = {
        "WORLD": world,
        "PROGRAMS": workspace.programs,
        "BM": tiles.m,
        "BN": tiles.n,
        "BK": tiles.k,
        "MODE": mode_of(workspace.mode, a.dtype),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if descriptors:
        tile = (1, 1, tiles.m, tiles.k)
        push_tiles_tma_kernel[(workspace.programs, ranks)](
            tma.describe(a, (ranks, world, m, k), (world * m * k, m * k, k, 1), tile),
            tma.describe_weight(b, tiles, stacked=ranks),
            *sizes,
            workspace.half_bytes,
            B_ROWS_LIE=tma.rows_lie(b),
            **how,
        )
    else:
        push_tiles_kernel[(workspace.programs, ranks)](
            a,
            b,
            *sizes,
            b.stride(0),
            b.stride(1),
            workspace.half_bytes,
            EVEN=tiles.is_even(k, n),
            **how,
        )


def add_parts(
    out: torch.Tensor,
    workspace: Workspace,
    *,
    tiles: int,
    average: bool,
    block: int = BLOCK,
    warps: int = 4,
    per_processor: int = 7,
) -> None:
    """Run the second kernel: each rank's part of ``out``, once ``tiles`` tiles of every rank
    have come.
    """
    ranks, world = workspace.local_ranks, workspace.world
    # Many small programs: the reduction is bound by memory, and more of them in flight hide its
    # latency.
    programs = min(per_processor * workspace.programs, MOST_PROGRAMS)
    reduce_parts_kernel[(programs, ranks)](
        out,
        workspace.peers,
        workspace.state,
        out.numel() // ranks,
        tiles,
        1.0 / world if average else 1.0,
        workspace.half_bytes,
        WORLD=world,
        PROGRAMS=programs,
        BLOCK=block,
        MODE=workspace.mode,
        num_warps=warps,
    )


@torch.library.custom_op("inductor_passes::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_name: str, group_size: int
) -> torch.Tensor:
    """``reduce_scatter(a @ b)`` along rows: ``a`` ``[rows, K]``, ``b`` ``[K, N]``, result ``[rows /
    group_size, N]``.

    ``reduce_op`` is ``sum`` or ``avg``. Raises KernelError for shapes that do not fit together.
    Where the kernels cannot run, torch's own operations do.
    """
    _check(a, b, reduce_op, group_size)
    workspace = None
    # Without a stride of 1 neither kernel can load whole lines of the weight, and a copy would cost
    # what the fusion saves.
    if 1 in b.stride():
        workspace = find_workspace(
            FAMILY,
            a,
            group_name,
            a.shape[0] * b.shape[1] * a.element_size(),
            programs=multiprocessors(a.device),
            flags=1,
        )
    if workspace is None:
        return reference(a, b, reduce_op, group_name, group_size)
    rows, capability = a.shape[0] // group_size, capability_of(a.device)
    a = a.contiguous()
    descriptors = tma.can_describe(capability, a, [b])
    if descriptors:
        a, b = tma.aligned(a), tma.aligned(b)
        tiles = tma.tma_tiles(rows)
    else:
        even = tiles_for(a.dtype, rows, capability).is_even(a.shape[1], b.shape[1])
        tiles = tiles_for(a.dtype, rows, capability, plain=even)
    return launch_matmul_reduce_scatter(
        a, b, workspace, average=reduce_op == "avg", tiles=tiles, descriptors=descriptors
    )


@matmul_reduce_scatter.register_fake
def _(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_name: str, group_size: int
) -> torch.Tensor:
    _check(a, b, reduce_op, group_size)
    return a.new_empty((a.shape[0] // group_size, b.shape[1]))


def _check(a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_size: int) -> None:
    fits = (
        a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and a.shape[0] % group_size == 0
        and a.dtype == b.dtype
        and reduce_op in REDUCE_OPS
    )
    if not fits:
        raise KernelError(
            f"matmul_reduce_scatter got a {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype} "
            f"and {reduce_op!r} on {group_size} ranks.",
            "It takes [rows, K] and [K, N] of one dtype, rows that all ranks share evenly, and sum "
            "or avg.",
            "Cast to one dtype, and pad the rows to a multiple of the ranks.",
        )


def reference(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group_name: str, group_size: int
) -> torch.Tensor:
    """The same with torch's own product and collective."""
    launch = c10d.reduce_scatter_tensor(a @ b, reduce_op, group_size, group_name)
    return c10d.wait_tensor(launch)
