"""``inductor_passes::all_reduce``: a sum over ranks for messages that fit into symmetric memory.

One-shot: every rank reads every rank's input. Two-shot: each rank sums its share and reads the other
shares' sums, which moves less for larger messages. Both sum in float32 in the order of ranks and round
once, so all ranks get identical bits, and both give the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.kernels import device as dev
from inductor_passes.kernels.workspace import Workspace, find_workspace

FAMILY = "all_reduce"
c10d = torch.ops._c10d_functional
BLOCK = 2048
# Above this many bytes a rank two-shot moves less; below, its second barrier costs more than it saves.
TWO_SHOT_BYTES = 512 << 10


@triton.jit
def all_reduce_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    n: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """Sum ``n`` elements. Virtual ranks are axis 1 of the grid; their ``x`` and ``out`` lie end to end.

    Under two-shot the ``j``-th block of a program is summed by rank ``j % WORLD``.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    local = tl.program_id(1)
    x_ptr += tl.cast(local, tl.int64) * n
    out_ptr += tl.cast(local, tl.int64) * n
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    sums = half + half_bytes // 2
    blocks = tl.cdiv(tl.cdiv(n, BLOCK) - program, PROGRAMS)

    mine = dev.data_of(peers_ptr, rank, half, DTYPE)
    for j in range(blocks):
        at = (j * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)
    ok = dev.pad_barrier(peers_ptr, program, epoch, rank, state_ptr, WORLD, MODE)
    if TWO_SHOT:
        share = dev.data_of(peers_ptr, rank, sums, DTYPE)
        for j in range(rank, blocks, WORLD):
            at = (j * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
            total = dev.sum_over_ranks(peers_ptr, half, at, at < n, WORLD, DTYPE)
            tl.store(share + at, total.to(DTYPE), mask=at < n)
        slot = PROGRAMS + program
        ok = ok & dev.pad_barrier(peers_ptr, slot, epoch, rank, state_ptr, WORLD, MODE)
    for j in range(blocks):
        at = (j * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
        if TWO_SHOT:
            share = dev.data_of(peers_ptr, j % WORLD, sums, DTYPE)
            total = tl.load(share + at, mask=at < n).to(tl.float32)
        else:
            total = dev.sum_over_ranks(peers_ptr, half, at, at < n, WORLD, DTYPE)
        tl.store(out_ptr + at, tl.where(ok, total, float("nan")).to(DTYPE), mask=at < n)
    dev.finish(state_ptr, program, epoch)


def launch_all_reduce(
    x: torch.Tensor, workspace: Workspace, *, two_shot: bool, block: int = BLOCK
) -> torch.Tensor:
    """Run the kernel. ``x`` is contiguous: this rank's input, or those of virtual ranks stacked."""
    out = torch.empty_like(x)
    n = x.numel() // workspace.local_ranks
    all_reduce_kernel[(workspace.programs, workspace.local_ranks)](
        x,
        out,
        workspace.peers,
        workspace.state,
        n,
        workspace.half_bytes,
        WORLD=workspace.world,
        PROGRAMS=workspace.programs,
        BLOCK=block,
        TWO_SHOT=two_shot,
        MODE=workspace.mode,
        num_warps=8,
        launch_cooperative_grid=workspace.local_ranks > 1,
    )
    return out


@torch.library.custom_op("inductor_passes::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Sum ``x`` (local shape, any) over the ranks of a group; the same bits on every rank.

    Where the kernel cannot run, torch's own all_reduce does.
    """
    size = x.numel() * x.element_size()
    two_shot = size > TWO_SHOT_BYTES
    workspace = find_workspace(FAMILY, x, group_name, size * (2 if two_shot else 1))
    if workspace is None:
        return reference(x, group_name)
    return launch_all_reduce(x.contiguous(), workspace, two_shot=two_shot)


@all_reduce.register_fake
def _(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def reference(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The same with torch's own collective, which may add in another order."""
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group_name))
