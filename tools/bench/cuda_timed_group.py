"""A process group on one GPU on which collectives are paced copies on a side stream, and waits are
events.

One process claims to be rank 0 of a world whose ranks all have the same data, so numbers are those
of such a world. Each group is one channel, first in, first out: a copy of the bytes that the
collective would move, by as many multiprocessors as a communication library would take, which ends
no sooner than the modelled link does. Kernels, streams and contention are real; the link is
modelled. For the same without a GPU: ``timed_group.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from timed_group import ChannelGroup, LinkTime, begin_job
from triton.language.extra.cuda import globaltimer

BACKEND = "timed_cuda"  # a name by which ranks are known to be of one process
PROGRAMS = 16  # multiprocessors that copy
BLOCK = 16384


@triton.jit
def paced_copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    read: tl.tensor,
    written: tl.tensor,
    factor: tl.tensor,
    ns: tl.tensor,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``target[i] = factor * source[i % read]``; every element of both is touched, evenly over
    ``ns``.
    """
    program = tl.program_id(0).to(tl.int64)
    start = globaltimer()
    ns = tl.cast(ns, tl.int64)
    count = tl.cdiv(tl.maximum(read, written), PROGRAMS * BLOCK)
    for i in range(count):
        at = (i * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(source_ptr + at % read)
        tl.store(
            target_ptr + at, (values * factor).to(target_ptr.dtype.element_ty), mask=at < written
        )
        while globaltimer() < start + ns * (i + 1) // count:
            pass


@triton.jit
def paced_kernel(ns: tl.tensor) -> None:
    """Take that long, and nothing else: a copy engine as compute sees it."""
    end = globaltimer() + tl.cast(ns, tl.int64)
    while globaltimer() < end:
        pass


class Link:
    """What all groups of the process share: how long a collective takes, who copies, how long
    all took.
    """

    us: LinkTime = staticmethod(lambda kind, payloads, ranks: 0.0)
    # "programs" copy; "engine": nothing is copied; "none": a collective is a copy of its input, at
    # once.
    copies = "programs"
    total_us = 0.0


class CudaTimedWork(dist.Work):
    """A collective on the side stream; waiting makes the current stream wait for it."""

    def __init__(self, done: torch.cuda.Event | None, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._done = done
        self._tensors: Sequence[torch.Tensor] = tensors  # nobody else gets their memory before

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()


class CudaTimedGroup(ChannelGroup):
    """One channel on a stream of its own."""

    backend = BACKEND

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, ranks)
        self._stream: torch.cuda.Stream | None = None

    def launch(
        self,
        kind: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> CudaTimedWork:
        if not inputs:
            return CudaTimedWork(None, ())
        # A sum over equal ranks, or another reduction, over what one of them has.
        summed = opts is not None and opts.reduceOp == dist.ReduceOp.SUM
        factor = float(len(self.ranks)) if summed else 1.0
        payloads = [tensor.numel() * tensor.element_size() for tensor in inputs]
        us = Link.us(kind, payloads, self.ranks)
        Link.total_us += us
        if Link.copies == "none":
            for target, source in zip(outputs, inputs, strict=True):
                _fill(target, source, factor)
            return CudaTimedWork(None, ())
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source, payload in zip(outputs, inputs, payloads, strict=True):
                ns = int(1e3 * us * payload / max(sum(payloads), 1))
                if Link.copies == "engine":
                    paced_kernel[(1,)](ns, num_warps=1)
                else:
                    paced_copy_kernel[(PROGRAMS,)](
                        source,
                        target,
                        source.numel(),
                        target.numel(),
                        factor,
                        ns,
                        PROGRAMS=PROGRAMS,
                        BLOCK=BLOCK,
                        num_warps=16,
                    )
            done = torch.cuda.Event()
            done.record()
        return CudaTimedWork(done, (*outputs, *inputs))


def _fill(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    if target.numel() > source.numel():
        target.view(-1, *source.shape).copy_(
            source.expand(target.numel() // source.numel(), *source.shape)
        )
    elif target.data_ptr() != source.data_ptr():
        target.view(-1).copy_(source.view(-1)[: target.numel()])
    if factor != 1.0:
        target.mul_(factor)


@contextlib.contextmanager
def cuda_timed_group(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world_size`` equal ranks. ``Link`` says what
    collectives take.
    """
    begin_job(CudaTimedGroup, ["cuda", "cpu"], world_size, rank=0)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def link(us: LinkTime, copies: str = "programs") -> Iterator[None]:
    """Another link in the block, for code that is compiled already; ``Link.total_us`` counts
    from 0.
    """
    before = Link.us, Link.copies
    Link.us, Link.copies, Link.total_us = staticmethod(us), copies, 0.0
    try:
        yield
    finally:
        Link.us, Link.copies = before
