"""``inductor_passes::all_to_all_grouped_matmul``, experimental: tokens to the ranks of their experts, times weights.

For mixtures of experts with a fixed capacity: each rank holds ``capacity`` rows for every expert, and each
rank owns ``experts`` of them. One launch, as in ``all_gather_matmul``: the first programs push each peer its
experts' rows and set one flag for each expert; the others multiply this rank's own rows first, then those of
the peers as they come. No pass uses it yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.errors import KernelError
from inductor_passes.kernels import device as dev
from inductor_passes.kernels.all_gather_matmul import COPIERS, COPY_BLOCK, MAX_CHUNKS, push_rows
from inductor_passes.kernels.tiles import (
    Tiles,
    capability_of,
    multiprocessors,
    tile_product,
    tiles_for,
)
from inductor_passes.kernels.workspace import Workspace, find_workspace

FAMILY = "all_to_all_grouped_matmul"
MAX_EXPERTS = MAX_CHUNKS.value  # of one rank: each has a flag
c10d = torch.ops._c10d_functional


@triton.jit
def all_to_all_grouped_matmul_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    E: tl.tensor,
    C: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COPIERS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """x ``[WORLD, E, C, K]`` by owner, weight ``[E, K, N]``, out ``[E, WORLD, C, N]`` by source.

    Virtual ranks are axis 1 of the grid; their tensors lie end to end.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    slab = tl.cast(E, tl.int64) * C * K  # the rows of one rank for one other
    x_ptr += local * WORLD * slab
    if program < COPIERS:
        push_rows(
            x_ptr,
            peers_ptr,
            state_ptr,
            rank,
            half,
            epoch,
            program,
            slab,
            tl.cast(C, tl.int64) * K,
            E,
            WORLD,
            COPIERS,
            COPY_BLOCK,
            DTYPE,
            True,
        )
    else:
        came = dev.data_of(peers_ptr, rank, half, DTYPE)
        flags = dev.flags_of(peers_ptr, rank)
        high = tl.cdiv(C, BM)
        per_expert = high * tl.cdiv(N, BN)
        per_rank = E * per_expert
        for t in tl.range(program - COPIERS, WORLD * per_rank, PROGRAMS - COPIERS, flatten=False):
            source = (rank + t // per_rank) % WORLD
            expert = t % per_rank // per_expert
            first_row = t % per_expert % high * BM
            first_col = t % per_expert // high * BN
            rows_ptr = x_ptr + tl.cast(rank, tl.int64) * slab
            poison = 0.0
            if source != rank:
                flag = flags + source * MAX_CHUNKS + expert
                ok = dev.flag_wait(flag, epoch, 1, source, expert, state_ptr, MODE)
                rows_ptr = came + tl.cast(source, tl.int64) * slab
                poison = tl.where(ok, 0.0, float("nan"))
            of_expert = tl.cast(expert, tl.int64)
            acc = tile_product(
                rows_ptr + (of_expert * C + first_row) * K,
                weight_ptr + (local * E + of_expert) * K * N + first_col,
                C - first_row,
                N - first_col,
                K,
                K,
                N,
                1,
                BM,
                BN,
                BK,
                EVEN,
                MODE,
            )
            row = tl.arange(0, BM)
            col = tl.arange(0, BN)
            out_row = (((local * E + of_expert) * WORLD) + source) * C + first_row
            at = out_ptr + out_row * N + first_col + row[:, None] * N + col[None, :]
            inside = (row < C - first_row)[:, None] & (col < N - first_col)[None, :]
            tl.store(at, (acc + poison).to(DTYPE), mask=inside)
    dev.finish(state_ptr, program, epoch)


def launch_all_to_all_grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    workspace: Workspace,
    *,
    tiles: Tiles,
    copiers: int = COPIERS,
    copy_block: int = COPY_BLOCK,
) -> torch.Tensor:
    """Run the kernel on contiguous ``x`` ``[WORLD * E, C, K]`` and ``weights`` ``[E, K, N]``; virtual ranks stacked."""
    ranks, world = workspace.local_ranks, workspace.world
    experts, k, n = weights.shape[0] // ranks, weights.shape[1], weights.shape[2]
    out = x.new_empty(ranks * experts, world * x.shape[1], n)
    all_to_all_grouped_matmul_kernel[(workspace.programs, ranks)](
        x,
        weights,
        out,
        workspace.peers,
        workspace.state,
        experts,
        x.shape[1],
        n,
        k,
        workspace.half_bytes,
        WORLD=world,
        PROGRAMS=workspace.programs,
        COPIERS=copiers,
        COPY_BLOCK=copy_block,
        BM=tiles.m,
        BN=tiles.n,
        BK=tiles.k,
        EVEN=tiles.is_even(k, n),
        MODE=workspace.mode,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_cooperative_grid=ranks > 1,
    )
    return out


@torch.library.custom_op("inductor_passes::all_to_all_grouped_matmul", mutates_args=())
def all_to_all_grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, group_name: str, group_size: int
) -> torch.Tensor:
    """``x`` ``[group_size * experts, capacity, K]`` by expert, ``weights`` ``[experts, K, N]`` of this rank's.

    Returns ``[experts, group_size * capacity, N]``: each own expert's product with the rows of every rank, in the
    order of ranks. Raises KernelError for shapes that do not fit. Where the kernel cannot run, torch does.
    """
    _check(x, weights, group_size)
    workspace = None
    if weights.shape[0] <= MAX_EXPERTS:
        workspace = find_workspace(
            FAMILY,
            x,
            group_name,
            x.numel() * x.element_size(),
            programs=multiprocessors(x.device),
            flags=MAX_EXPERTS,
        )
    if workspace is None:
        return reference(x, weights, group_name, group_size)
    capability = capability_of(x.device)
    even = tiles_for(x.dtype, x.shape[1], capability).is_even(*weights.shape[1:])
    tiles = tiles_for(x.dtype, x.shape[1], capability, plain=even)
    return launch_all_to_all_grouped_matmul(
        x.contiguous(), weights.contiguous(), workspace, tiles=tiles
    )


@all_to_all_grouped_matmul.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, group_name: str, group_size: int) -> torch.Tensor:
    _check(x, weights, group_size)
    return x.new_empty((weights.shape[0], group_size * x.shape[1], weights.shape[2]))


def _check(x: torch.Tensor, weights: torch.Tensor, group_size: int) -> None:
    fits = (
        x.dim() == weights.dim() == 3
        and x.shape[0] == group_size * weights.shape[0]
        and x.shape[2] == weights.shape[1]
        and x.dtype == weights.dtype
    )
    if not fits:
        raise KernelError(
            f"all_to_all_grouped_matmul got x {list(x.shape)} {x.dtype} and weights "
            f"{list(weights.shape)} {weights.dtype} on {group_size} ranks.",
            "It takes [ranks * experts, capacity, K] and [experts, K, N] of one dtype.",
            "Give every expert the same capacity, and every rank the same number of experts.",
        )


def reference(
    x: torch.Tensor, weights: torch.Tensor, group_name: str, group_size: int
) -> torch.Tensor:
    """The same with torch's own collective and products."""
    share = [weights.shape[0]] * group_size
    launch = c10d.all_to_all_single(x.contiguous(), share, share, group_name)
    return grouped(c10d.wait_tensor(launch), weights)


def grouped(came: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the products that follow the exchange; ``came`` is ``[ranks * experts, capacity, K]`` by source."""
    experts, k, _ = weights.shape
    rows = came.view(-1, experts, came.shape[1], k).transpose(0, 1)
    return torch.bmm(rows.reshape(experts, -1, k), weights)
