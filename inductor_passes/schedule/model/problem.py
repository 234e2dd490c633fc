"""A schedule problem: a training graph reduced to numbers, and the schedule that answers it.

Plain data, no torch: what runs where, for how long, what depends on what, and how much memory each value
holds. ``json_format.py`` reads and writes both as JSON.

The rules of execution: one compute stream, in schedule order. One channel per process group, first in,
first out, in schedule order. A launch starts when all compute before it has finished and its channel is
free; it occupies no compute time. A wait blocks the compute stream until its launch has finished. While
a channel is busy, compute takes ``compute_stretch`` times as long. A collective that returns when it is
done starts like a launch, and blocks the compute stream like a wait for itself.
Launches of equal ``merge_key``, none reachable from another, may share a bucket: one launch of the summed
payload, packed before it and, for gathers and all-to-alls, unpacked at its wait, on the compute stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("compute", "launch", "wait", "input", "output")
MERGED_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
UNPACKED_OPS = ("all_gather", "all_to_all")
MIB = 2**20

LinkTable = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One entry of the program; its id is its place in ``Problem.nodes``.

    ``kind``: one of ``KINDS``. ``deps``: ids that must come before it.
    ``us``: microseconds on the compute stream; 0 for launches, waits and views.
    ``bytes``: fresh memory that its value holds on this rank; 0 for a view or a wait.
    ``alias``: id whose memory the value shares, or None.
    ``group``, ``op``, ``dtype``, ``reduce``, ``payload``: of a launch; ``payload`` is bytes of this rank's
    input, ``reduce`` is None for operations that do not reduce. ``group`` of compute: it is a collective
    that returns when it is done; it holds the compute stream and that group's channel for ``us``.
    ``launch``: of a wait, the launch it waits for; None for a value launched outside the graph.
    """

    name: str
    kind: str
    deps: tuple[int, ...] = ()
    us: float = 0.0
    bytes: int = 0
    alias: int | None = None
    group: str = ""
    op: str = ""
    dtype: str = ""
    reduce: str | None = None
    payload: int = 0
    launch: int | None = None

    @property
    def blocks(self) -> bool:
        """Return whether it is a collective that holds the compute stream."""
        return self.kind == "compute" and bool(self.group)

    @property
    def merge_key(self) -> tuple[str, str, str, str]:
        """Launches may share a bucket only if this is equal."""
        return (self.group, self.op, self.dtype, self.reduce or "")


@dataclass(frozen=True, slots=True)
class Problem:
    """``nodes`` in program order, so that each stands behind its dependencies.

    ``links``: group -> operation -> points (payload in MiB, microseconds), piecewise linear, the first
    point being the floor. An operation without a table of its own takes the first of its group's, by name.
    ``copy_bytes_per_us``: rate of packing and unpacking buckets, over bytes read plus bytes written.
    ``group_size``: ranks of each group. ``compute_stretch``: how many times as long compute takes beside a
    collective; at least 1.
    """

    name: str
    nodes: tuple[Node, ...]
    links: Mapping[str, Mapping[str, LinkTable]]
    copy_bytes_per_us: float
    group_size: Mapping[str, int]
    compute_stretch: float = 1.0

    def link_table(self, group: str, op: str) -> LinkTable:
        """The points that price ``op`` on ``group``."""
        tables = self.links[group]
        return tables.get(op) or tables[min(tables)]

    def link_us(self, group: str, op: str, payload_bytes: int) -> float:
        """Time of one launch of ``payload_bytes`` (this rank's input) on the channel of ``group``."""
        return link_us_at(self.link_table(group, op), payload_bytes / MIB)

    def launch_us(self, launch: int) -> float:
        """Time of a launch alone, outside any bucket."""
        node = self.nodes[launch]
        return self.link_us(node.group, node.op, node.payload)

    def output_bytes(self, launch: int) -> int:
        """Bytes of a launch's result on this rank, as unpacking counts them."""
        node = self.nodes[launch]
        return node.payload * (self.group_size[node.group] if node.op == "all_gather" else 1)

    def pack_us(self, members: tuple[int, ...] | list[int]) -> float:
        """Time on the compute stream to copy the members of a bucket together."""
        return 2 * sum(self.nodes[i].payload for i in members) / self.copy_bytes_per_us

    def unpack_us(self, members: tuple[int, ...] | list[int]) -> float:
        """Time on the compute stream, at the bucket's wait, to copy its results apart."""
        if self.nodes[members[0]].op not in UNPACKED_OPS:
            return 0.0
        return 2 * sum(self.output_bytes(i) for i in members) / self.copy_bytes_per_us


@dataclass(frozen=True, slots=True)
class Schedule:
    """``order``: every node id once. ``buckets``: launches that run as one, two or more each.

    The members of a bucket stand next to each other in ``order``, and so do its waits.
    """

    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...] = ()


def program_order(problem: Problem) -> Schedule:
    """The schedule that changes nothing."""
    return Schedule(tuple(range(len(problem.nodes))))


def link_us_at(points: LinkTable, mib: float) -> float:
    """Microseconds at ``mib``: the floor below the first point, the last slope beyond the last."""
    if mib <= points[0][0]:
        return points[0][1]
    right = min(bisect_left(points, (mib,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    if mib <= x1:
        return y0 + (y1 - y0) * (mib - x0) / (x1 - x0)
    return y1 + (y1 - y0) / (x1 - x0) * (mib - x1)
