"""How fast the kernels' own copies, barriers, looks at a flag and sums are on one GPU, beside
memory's roof.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gpu_streams import NormCase
from gpu_timing import copy_gb_per_s, median_us

from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels.gather_tma import push_rows
from inductor_passes.fused.kernels.tiles import multiprocessors
from inductor_passes.fused.kernels.workspace import LOOKS_PER_SECOND, Workspace, bytes_needed

BF16 = torch.bfloat16
WORLD = 8
ROWS, WIDTH = 1024, 8192  # of one rank
CHUNKS = 8
# Programs, elements of a block, warps.
PUSHES = ((8, 32768, 16), (16, 8192, 8), (16, 16384, 8), (16, 32768, 16), (32, 8192, 8))
BARRIER_ROWS = (1, 4, 16, 64)
LOOKERS = 16
LOOKS = 100_000


@triton.jit
def push_kernel(
    a_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    n: tl.tensor,
    chunk_size: tl.tensor,
    chunks: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    COPIERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Push ``n`` elements to every peer as ``all_gather_matmul`` does, and nothing else."""
    program = tl.program_id(0)
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    push_rows(
        a_ptr,
        peers_ptr,
        state_ptr,
        rank,
        tl.cast(epoch & 1, tl.int64) * half_bytes,
        epoch,
        program,
        tl.cast(n, tl.int64),
        tl.cast(chunk_size, tl.int64),
        chunks,
        WORLD,
        COPIERS,
        BLOCK,
        a_ptr.dtype.element_ty,
    )
    dev.finish(state_ptr, program, epoch)


@triton.jit
def look_kernel(peers_ptr: tl.tensor, state_ptr: tl.tensor) -> None:
    """Wait for a flag that never comes."""
    flag = dev.flags_of(peers_ptr, 0)
    dev.flag_wait(flag, 1, 1, 1, 0, state_ptr, dev.REAL)


def measure_copies() -> dict[str, Any]:
    """Rates in GB/s, times in microseconds; of memory's rate, reads plus writes."""
    roof = copy_gb_per_s()
    return {
        "copy_gb_per_s": roof,
        "push": pushes(),
        "barrier_us": barriers(),
        **looks(),
        "reduce": reduction(roof),
    }


def space(family: str, data_bytes: int, programs: int, flags: int, **more: int) -> Workspace:
    """Rank 0 of eight, all of whose buffers are in this device's memory."""
    buffers = torch.zeros(WORLD, bytes_needed(data_bytes), dtype=torch.uint8, device="cuda")
    return Workspace(family, [*buffers], 0, programs=programs, flags=flags, **more)


def pushes() -> list[dict[str, Any]]:
    """GB/s that reach all peers, by programs and block: each byte is also read."""
    a = torch.randn(ROWS * WIDTH, device="cuda", dtype=BF16)
    found = []
    for programs, block, warps in PUSHES:
        area = space("all_gather_matmul", WORLD * a.nbytes, programs, 16)

        def push(area: Workspace = area, block: int = block, warps: int = warps) -> None:
            push_kernel[(area.programs,)](
                a,
                area.peers,
                area.state,
                a.numel(),
                a.numel() // CHUNKS,
                CHUNKS,
                area.half_bytes,
                WORLD=WORLD,
                COPIERS=area.programs,
                BLOCK=block,
                num_warps=warps,
            )

        us = median_us(push)
        gb_per_s = (WORLD - 1) * a.nbytes / us / 1e3
        found.append(
            {"programs": programs, "block": block, "warps": warps, "us": us, "gb_per_s": gb_per_s}
        )
    return found


def barriers() -> dict[str, float]:
    """``all_reduce_add_rmsnorm`` of eight virtual ranks and few rows: a barrier is nearly all of
    it.
    """
    found = {}
    for rows in BARRIER_ROWS:
        case = NormCase(rows, 1024, two_shot=False)
        found[f"{rows} rows"] = median_us(case.fused)
        case.space.raise_if_failed()
    return found


def looks() -> dict[str, float]:
    """Looks at a flag in a second, sixteen programs at it; ``workspace.LOOKS_PER_SECOND`` is
    beside it.
    """
    area = space("all_gather_matmul", 1 << 16, LOOKERS, 16, spin_limit=LOOKS)

    def again() -> None:
        area.state[0, dev.FAILED.value] = 0

    us = median_us(lambda: look_kernel[(LOOKERS,)](area.peers, area.state, num_warps=8), again)
    return {"looks_per_second": LOOKS / us * 1e6, "looks_per_second_assumed": LOOKS_PER_SECOND}


def reduction(roof: float) -> dict[str, float]:
    """The second kernel of ``matmul_reduce_scatter``: its parts are there."""
    out = torch.empty(ROWS, WIDTH, device="cuda", dtype=BF16)
    programs = multiprocessors(out.device)
    area = space("matmul_reduce_scatter", WORLD * out.nbytes, programs, 1)
    us = median_us(lambda: scatter.add_parts(out, area, tiles=0, average=False))
    area.raise_if_failed()
    rate = (WORLD + 1) * out.nbytes / us / 1e3
    return {"us": us, "gb_per_s": rate, "share_of_copy": rate / roof}
