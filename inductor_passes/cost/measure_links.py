"""Measure the links of a job: each kind of collective on groups of several shapes, by payload."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from inductor_passes.cost.collectives import GroupShape
from inductor_passes.cost.measure_device import (
    LEAST_SAMPLES,
    WARM_UP,
    Clock,
    Note,
    measure_stretch,
    slowest,
    typical_us,
)
from inductor_passes.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class Layout:
    """A job of ``ranks`` ranks on ``nodes`` hosts, as many on each, in order."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of one host."""
        return self.ranks // self.nodes

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Layout:
        """The layout of ranks on the hosts named. Raises CalibrationError for one that no
        topology has.
        """
        names = list(dict.fromkeys(hosts))
        per_node = len(hosts) // len(names)
        if list(hosts) != [name for name in names for _ in range(per_node)]:
            counts = ", ".join(f"{hosts.count(name)} on {name}" for name in names)
            raise CalibrationError(
                f"The job's ranks are not laid out evenly and in order: {counts}.",
                "A topology has as many ranks on every node, numbered through.",
                "Start as many on each host, the ranks of one host after another, as torchrun "
                "does.",
            )
        return cls(len(hosts), len(names))

    def groups_of(self, rank: int) -> dict[GroupShape, list[int]]:
        """Shape and global ranks of each group that ``rank`` measures in; the same shapes on every
        rank.

        Within a host those of two ranks, four and so on, and all; across hosts one rank of each,
        and all. All ranks of the job come last.
        """
        found: dict[GroupShape, list[int]] = {}
        size = 2
        while size < self.per_node:
            if self.per_node % size == 0:
                found[GroupShape(size, 1)] = _block(rank, size)
            size *= 2
        if self.per_node > 1:
            found[GroupShape(self.per_node, 1)] = _block(rank, self.per_node)
        if self.nodes > 1:
            across = range(rank % self.per_node, self.ranks, self.per_node)
            found[GroupShape(self.nodes, self.nodes)] = list(across)
            found[GroupShape(self.ranks, self.nodes)] = list(range(self.ranks))
        return found


def _block(rank: int, size: int) -> list[int]:
    first = rank // size * size
    return list(range(first, first + size))


def layout_of_job(host: str = "") -> Layout:
    """Learn from all ranks which of them share a host. Every rank of the job calls it.

    ``host`` is a name for this host, for jobs where host names do not distinguish hosts. Raises
    CalibrationError if the layout is uneven.
    """
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, host or socket.gethostname())
    return Layout.of(names)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PAYLOADS = (4, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
CUDA_PAYLOADS = (4, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
# Of what all ranks of a group hold together after a gather, and before a reduce-scatter.
LARGEST_BYTES = 2 << 30
_ITEM = torch.float32.itemsize
# Shares of the time, of which each point of a table has one, for kernels beside a collective.
STRETCH_SHARES = 8
LAUNCHES, LAUNCHING_US = 60, 1e6  # that are timed alone, and for how long in all
Points = dict[int, float]


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Microseconds on a job's links: (kind, group's shape) -> bytes of one rank's input -> time.

    ``stretch``: how many times as long kernels take beside a collective of all ranks; None if not
        measured.
    ``launching_us``: on a CPU, processor time that a launch takes of what computes.
    """

    layout: Layout
    device_type: str
    how: str
    tables: dict[tuple[str, GroupShape], Points] = field(default_factory=dict)
    stretch: float | None = None
    launching_us: float | None = None


def measure_links(
    clock: Clock,
    layout: Layout,
    *,
    seconds: float = 30.0,
    kinds: Sequence[str] = KINDS,
    payloads: Iterable[int] = (),
    note: Note = lambda text: None,
) -> LinkTimes:
    """Measure the links between the ranks of an initialised job.

    Every rank calls it, with equal arguments. All groups of one shape are measured at the same
    time, as a job uses them. Each collective is started and waited for as in compiled code.

    ``kinds``, shapes and ``payloads`` share the total of ``seconds``. A large payload that would
    take more than its share is left out. ``note`` is called with the name of each table before its
    measurement. Every process group that it creates is destroyed. The slowdown of kernels is
    measured beside the first of ``kinds``, on all ranks.
    """
    found = LinkTimes(layout, clock.device.type, clock.how)
    sizes = sorted(payloads) or (CUDA_PAYLOADS if clock.device.type == "cuda" else PAYLOADS)
    groups = layout.groups_of(dist.get_rank())
    share_us = seconds * 1e6 / max(1, len(groups) * len(kinds) * len(sizes) + STRETCH_SHARES)
    for shape, ranks in groups.items():
        with _group(ranks) as group:
            for kind in kinds:
                note(f"{kind}, {shape.size} ranks on {shape.nodes} nodes")
                found.tables[kind, shape] = _table(clock, kind, group, sizes, share_us)
    note("kernels beside a collective")
    *_, everyone = groups
    points = found.tables[kinds[0], everyone]
    stretch = measure_stretch(clock, points, _of_all(clock, kinds[0]), STRETCH_SHARES * share_us)
    launching = None
    if clock.device.type == "cpu":
        launching = _launching_us(clock, layout, points, _of_all(clock, kinds[0])(min(points)))
    return replace(found, stretch=stretch, launching_us=launching)


def _launching_us(
    clock: Clock, layout: Layout, points: Points, start: Callable[[], torch.Tensor]
) -> float:
    """Processor time of the smallest collective, on the slowest rank.

    The library's threads count too, unless the host has a second core for each thread that
    computes.
    """
    cores = os.cpu_count() or 1
    spare = cores >= 2 * torch.get_num_threads() * layout.per_node
    now = time.thread_time if spare else time.process_time
    calls = max(LEAST_SAMPLES, min(LAUNCHES, int(LAUNCHING_US / min(points.values()))))
    samples = []
    for _ in range(WARM_UP + calls):
        began = now()
        torch.ops._c10d_functional.wait_tensor(start())
        samples.append((now() - began) * 1e6)
    return slowest([statistics.median(samples[WARM_UP:])], clock.device)[0]


def table_count(layout: Layout) -> int:
    """Times that ``measure_links`` calls ``note``."""
    groups = layout.groups_of(0)
    return len(groups) * len(KINDS) + bool(groups)


def _table(
    clock: Clock, kind: str, group: dist.ProcessGroup, sizes: Iterable[int], share_us: float
) -> Points:
    points: Points = {}
    for size in sizes:
        elements = _elements(kind, size, group.size())
        payload = elements * _ITEM
        largest = payload * group.size() if kind == "all_gather" else payload
        if points:
            last, us = max(points.items())
            least_us = us * payload / last if len(points) > 1 else us
            if largest > LARGEST_BYTES or least_us * (WARM_UP + LEAST_SAMPLES) > share_us:
                break
        mine = torch.ones(elements, dtype=torch.float32, device=clock.device)
        points[payload] = typical_us(clock, _call(kind, mine, group), share_us, group)
    return points


def _elements(kind: str, size: int, ranks: int) -> int:
    """Elements of one rank's input, which is shared out evenly where the collective shares it
    out.
    """
    parts = ranks if kind in ("reduce_scatter", "all_to_all") else 1
    return max(1, size // _ITEM // parts) * parts


def _of_all(clock: Clock, kind: str) -> Callable[[int], Callable[[], torch.Tensor]]:
    world = dist.group.WORLD
    assert world is not None

    def of_payload(payload: int) -> Callable[[], torch.Tensor]:
        mine = torch.ones(payload // _ITEM, dtype=torch.float32, device=clock.device)
        return launch_of(kind, mine, world.group_name, world.size())

    return of_payload


def _call(kind: str, mine: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    start = launch_of(kind, mine, group.group_name, group.size())
    return lambda: torch.ops._c10d_functional.wait_tensor(start())


def launch_of(kind: str, mine: torch.Tensor, name: str, ranks: int) -> Callable[[], torch.Tensor]:
    """What launches a collective of this input over the group of that name and as many ranks,
    and returns what to wait for.
    """
    ops = torch.ops._c10d_functional
    share = [mine.numel() // ranks] * ranks
    launch: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: ops.all_gather_into_tensor(mine, ranks, name),
        "reduce_scatter": lambda: ops.reduce_scatter_tensor(mine, "sum", ranks, name),
        "all_reduce": lambda: ops.all_reduce(mine, "sum", name),
        "all_to_all": lambda: ops.all_to_all_single(mine, share, share, name),
    }
    return launch[kind]


@contextmanager
def _group(ranks: Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """A process group of these ranks, of whom alone it is asked; gone afterwards."""
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        yield world
        return
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
