"""An emulated link on one GPU: a kernel that really copies rows and releases flags at a given
rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels.gather_tma import MAX_CHUNKS
from inductor_passes.fused.kernels.workspace import FLAG_WORDS, Workspace

PROGRAMS = 16
BLOCK = 32768  # eight loads of 16 bytes a thread in flight: 16 multiprocessors must reach 450 GB/s


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
    COPIES: tl.constexpr,
) -> None:
    """Copy chunk ``order[i]`` and set its flag, no sooner than the link has moved it.

    That is ``(i + 1) * chunk_ns`` after the stamp, for i from ``already`` on.
    """
    program = tl.program_id(0)
    start = tl.load(start_ptr)
    for i in range(already, already + chunks):
        chunk = tl.load(order_ptr + i)
        first = tl.cast(chunk, tl.int64) * chunk_size
        if COPIES:
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
    """The peers of rank 0, emulated: their ``rows`` ``[world * own, K]`` come to it at ``gb_per_s``
    in all.

    ``buffer`` is rank 0's; ``chunk_rows`` what the kernel has a flag for.
    """

    def __init__(
        self, buffer: torch.Tensor, rows: torch.Tensor, world: int, chunk_rows: int
    ) -> None:
        self.buffer, self.rows = buffer, rows
        own = rows.shape[0] // world
        self.per_rank = own // chunk_rows
        self.chunk_size = chunk_rows * rows.shape[1]
        place = rows.device
        self.order = torch.arange(
            self.per_rank, world * self.per_rank, dtype=torch.int32, device=place
        )
        self.reversed = self.order.flip(0)
        self.counters = torch.zeros(world * self.per_rank, dtype=torch.int32, device=place)
        self.start = torch.zeros(1, dtype=torch.int64, device=place)
        self.flags = buffer.view(torch.int32)[:FLAG_WORDS]
        self.epoch = 0

    def prepare(self, space: Workspace) -> None:
        """Before the next call of a kernel on ``space``: nothing has come, rows are poisoned."""
        self.epoch = int(space.state[0, dev.EPOCHS.value]) + 1
        first = FLAG_WORDS * 4 + (self.epoch & 1) * space.half_bytes
        self.half = self.buffer[first : first + self.rows.nbytes].view(self.rows.dtype)
        self.half.fill_(float("nan"))
        self.flags.zero_()

    def preset(self, space: Workspace) -> None:
        """Before the next call of a kernel on ``space``: all rows and flags are there."""
        self.prepare(space)
        self.half.copy_(self.rows.view(-1))
        self.flags.fill_(self.epoch)

    def begin(self) -> None:
        """The link starts to move rows now, on the current stream."""
        stamp_kernel[(1,)](self.start)

    def send(
        self,
        gb_per_s: float,
        *,
        backwards: bool = False,
        peer: int | None = None,
        copies: bool = True,
    ) -> None:
        """Start the copy on the current stream: of all peers' rows, or those of one.

        Without ``copies`` the rows are there, and one program sets flags at the link's pace.
        """
        programs = PROGRAMS if copies else 1
        chunk_ns = int(self.chunk_size * self.rows.element_size() / gb_per_s)
        paced_kernel[(programs,)](
            self.rows,
            self.half,
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
            PROGRAMS=programs,
            BLOCK=BLOCK,
            COPIES=copies,
            num_warps=16 if copies else 4,
        )
