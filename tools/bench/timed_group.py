"""A process group on which collectives take a given time and nothing else: no peer, no copy, no
CPU.

One process claims to be a rank of a world of any size. Each group is one channel, first in, first
out; a wait sleeps until its collective would have ended. Results hold whatever memory held: numbers
mean nothing here, time does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "timed"

# Kind of collective, bytes of this rank's input (several for a coalesced call), global ranks ->
# microseconds.
LinkTime = Callable[[str, Sequence[int], tuple[int, ...]], float]


class WallClock:
    """Seconds of this machine; waiting sleeps."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def pass_until(self, end: float) -> None:
        """Return when ``now()`` is at least ``end``."""
        left = end - self.now()
        if left > 0:
            time.sleep(left)


class ThreadClock(WallClock):
    """CPU time of this thread, plus the time that it would have waited; waiting returns at once.

    For measurements on a machine that is busy with other work: that work does not count. The
    thread must do all computing itself.
    """

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def pass_until(self, end: float) -> None:
        self._waited += max(0.0, end - self.now())


class _Link:
    """Settings that all groups of the process share: how long a collective takes, on which
    clock.
    """

    us: LinkTime = staticmethod(lambda kind, payloads, ranks: 0.0)
    clock = WallClock()


class TimedWork(dist.Work):
    """A collective that ends at ``end`` on the link's clock."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: Any = None) -> bool:
        _Link.clock.pass_until(self.end)
        return True

    def is_completed(self) -> bool:
        return _Link.clock.now() >= self.end


class ChannelGroup(dist.ProcessGroup):
    """One process's part of a group whose peers are not there: every collective is a ``launch``."""

    backend = ""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.ranks = ranks
        self._name = ""

    def launch(
        self,
        kind: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> dist.Work:
        """Begin a collective of a kind; several inputs are a coalesced one."""
        raise NotImplementedError

    def getBackendName(self) -> str:
        return self.backend

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.launch("all_gather", [output], [given])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.launch("all_gather", outputs, inputs)

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        return self.launch("reduce_scatter", [output], [given], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.launch("reduce_scatter", outputs, inputs, opts)

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.launch("all_reduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.launch("all_reduce", tensors, tensors, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        return self.launch("all_to_all", [output], [given])

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return self.launch("broadcast", tensors, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self.launch("barrier", [], [])


class TimedGroup(ChannelGroup):
    """One channel. Collectives return at once; their works end when the link is done with them."""

    backend = BACKEND

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, ranks)
        self._free_at = 0.0

    def launch(
        self,
        kind: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> TimedWork:
        payloads = [tensor.numel() * tensor.element_size() for tensor in inputs]
        start = max(_Link.clock.now(), self._free_at)
        self._free_at = start + 1e-6 * _Link.us(kind, payloads, self.ranks)
        return TimedWork(self._free_at)


def begin_job(group: type[ChannelGroup], devices: list[str], world_size: int, rank: int) -> None:
    """Initialise the default process group on this kind of group, for tensors of these devices."""
    name = group.backend
    if name.upper() not in dist.Backend.backend_list and name not in dist.Backend.backend_list:

        def create(prefix_store: Any, rank: int, size: int, timeout: Any) -> ChannelGroup:
            return group(rank, tuple(range(size)))

        dist.Backend.register_backend(name, create, devices=devices)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size)


@contextlib.contextmanager
def timed_group(
    world_size: int, link_us: LinkTime, rank: int = 0, clock: WallClock | None = None
) -> Iterator[WallClock]:
    """Inside, this process is ``rank`` of ``world_size``, and collectives take ``link_us``.

    Groups made inside are timed too, each on a channel of its own; ``link_us`` gets ranks counted
    from 0 within the group. Yields the clock, by default that on the wall. Raises RuntimeError if a
    group is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "timed_group() needs to own the default process group, but one is initialised. "
            "Call torch.distributed.destroy_process_group() first."
        )
    before, _Link.us = _Link.us, staticmethod(link_us)
    _Link.clock = clock or WallClock()
    begin_job(TimedGroup, ["cpu"], world_size, rank)
    try:
        yield _Link.clock
    finally:
        dist.destroy_process_group()
        _Link.us, _Link.clock = before, WallClock()


@contextlib.contextmanager
def link_time(link_us: LinkTime) -> Iterator[None]:
    """Another link in the block, for code that is compiled already."""
    before, _Link.us = _Link.us, staticmethod(link_us)
    try:
        yield
    finally:
        _Link.us = before
