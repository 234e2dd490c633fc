"""An emulated link on one GPU: a kernel that really copies rows and releases flags at a given rate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from inductor_passes.kernels import device as dev
from inductor_passes.kernels.all_gather_matmul import MAX_CHUNKS
from inductor_passes.kernels.workspace import FLAG_WORDS, Workspace

PROGRAMS = 16
BLOCK = 8192


@triton.jit
def stamp_kernel(start_ptr: tl.tensor) -> None:
    """Note the device's clock, in nanoseconds."""
    tl.store(start_ptr, globaltimer())


@triton.jit
def paced_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    start_ptr: tl.tensor,
    order_ptr: tl.tensor,
    already: tl.tensor,
    chunks: tl.tensor,
    per_rank: tl.tensor,
    chunk_size: tl.tensor,
    chunk_ns: tl.tensor,
    epoch: tl.tensor,
    FLAGS_PER_RANK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy chunk ``order[i]`` and set its flag, no sooner than the link has moved it.

    That is ``(i + 1) * chunk_ns`` after the stamp, for i from ``already`` on.
    """
    program = tl.program_id(0)
    start = tl.load(start_ptr)
    for i in range(already, already + chunks):
        chunk = tl.load(order_ptr + i)
        first = tl.cast(chunk, tl.int64) * chunk_size
        for offset in range(program * BLOCK, chunk_size, PROGRAMS * BLOCK):
            at = offset + tl.arange(0, BLOCK)
            values = tl.load(source_ptr + first + at, mask=at < chunk_size)
            tl.store(target_ptr + first + at, values, mask=at < chunk_size)
        while globaltimer() < start + (i + 1) * tl.cast(chunk_ns, tl.int64):
            pass
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + chunk, 1, sem="acq_rel", scope="gpu") + 1
        if arrived == PROGRAMS:
            tl.atomic_xchg(counters_ptr + chunk, 0, sem="relaxed", scope="gpu")
            flag = chunk // per_rank * FLAGS_PER_RANK + chunk % per_rank
            dev.signal(flags_ptr + flag, epoch)


class Link:
    """The peers of rank 0, emulated: their rows ``[world * rows, K]`` come at ``gb_per_s`` in all."""

    def __init__(self, workspace: Workspace, rows: torch.Tensor, chunk_rows: int) -> None:
        self.workspace, self.rows = workspace, rows
        self.world = workspace.world
        self.own = rows.shape[0] // self.world
        self.per_rank = self.own // chunk_rows
        self.chunk_size = chunk_rows * rows.shape[1]
        self.epoch = 0
        chunks = torch.arange(self.per_rank, self.world * self.per_rank, dtype=torch.int32)
        self.order = chunks.to(rows.device)
        self.reversed = chunks.flip(0).to(rows.device)
        self.counters = torch.zeros(chunks.numel() + self.per_rank, dtype=torch.int32).to(
            rows.device
        )
        self.start = torch.zeros(1, dtype=torch.int64, device=rows.device)
        self.flags = workspace.buffers[0].view(torch.int32)[:FLAG_WORDS]

    def begin(self) -> None:
        """The next call starts now."""
        self.epoch += 1
        stamp_kernel[(1,)](self.start)

    def half(self) -> torch.Tensor:
        """Where the rows of this call lie at rank 0."""
        first = FLAG_WORDS * 4 + (self.epoch & 1) * self.workspace.half_bytes
        size = self.rows.numel() * self.rows.element_size()
        return self.workspace.buffers[0][first : first + size].view(self.rows.dtype)

    def preset(self) -> None:
        """All rows and flags are there already."""
        self.half().copy_(self.rows.view(-1))
        self.flags.fill_(self.epoch)

    def send(self, gb_per_s: float, *, backwards: bool = False, peer: int | None = None) -> None:
        """Start the copy on the current stream: of all peers' rows, or those of one."""
        chunk_ns = int(self.chunk_size * self.rows.element_size() / gb_per_s)
        paced_kernel[(PROGRAMS,)](
            self.rows,
            self.half(),
            self.flags,
            self.counters,
            self.start,
            self.reversed if backwards else self.order,
            0 if peer is None else (peer - 1) * self.per_rank,
            self.order.numel() if peer is None else self.per_rank,
            self.per_rank,
            self.chunk_size,
            chunk_ns,
            self.epoch,
            FLAGS_PER_RANK=MAX_CHUNKS,
            PROGRAMS=PROGRAMS,
            BLOCK=BLOCK,
            num_warps=16,
        )
