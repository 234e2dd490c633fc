"""A schedule problem: a training graph reduced to numbers, its checks, and the schedule that
answers it.

Plain data, no torch: what runs where, for how long, what depends on what, and how much memory each
value holds. ``problem_file.py`` reads and writes both as JSON.

The rules of execution: one compute stream, in schedule order. One channel per process group, first
in, first out, in schedule order. A launch starts when all compute before it has finished and its
channel is free; it occupies no compute time. A wait blocks the compute stream until its launch has
finished. While a channel is busy, compute takes ``compute_stretch`` times as long. A collective
that returns when it is done starts like a launch, and blocks the compute stream like a wait for
itself. Launches of equal ``merge_key``, none reachable from another, may share a bucket: one launch
of the summed payload, packed before it and, for gathers and all-to-alls, unpacked at its wait, on
the compute stream.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from inductor_passes.errors import ProblemError

KINDS = ("compute", "launch", "wait", "input", "output")
MERGED_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
UNPACKED_OPS = ("all_gather", "all_to_all")
OFFLOAD, RELOAD = "offload", "reload"  # copies to the host's memory and back
MIB = 2**20

LinkTable = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One entry of the program; its id is its place in ``Problem.nodes``.

    ``kind``: one of ``KINDS``. ``deps``: ids that must come before it.
    ``us``: microseconds on the compute stream; 0 for launches, waits and views.
    ``bytes``: fresh memory that its value holds on this rank; 0 for a view or a wait.
    ``alias``: id whose memory the value shares, or None.
    ``group``, ``op``, ``dtype``, ``reduce``, ``payload``: of a launch; ``payload`` is bytes of this
        rank's input, ``reduce`` is None for operations that do not reduce. ``group`` of compute: it
        is a collective that returns when it is done; it holds the compute stream and that group's
        channel for ``us``.
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
    def copies(self) -> str:
        """``OFFLOAD`` or ``RELOAD`` for a launch that copies to the host or back, or ""."""
        does = self.op.partition(",")[0]
        return does if does in (OFFLOAD, RELOAD) else ""

    @property
    def merge_key(self) -> tuple[str, str, str, str]:
        """Launches may share a bucket only if this is equal."""
        return (self.group, self.op, self.dtype, self.reduce or "")


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold a schedule problem: ``nodes`` in program order, each after its dependencies.

    ``links``: group -> operation -> points (payload in MiB, microseconds), piecewise linear. The
        first point is the latency. An operation without a table of its own takes the first of its
        group's, by name.
    ``copy_bytes_per_us``: rate of packing and unpacking buckets, over bytes read plus bytes
        written.
    ``group_size``: ranks of each group.
    ``compute_stretch``: slowdown factor of compute beside a collective; at least 1.
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
        """Time of one launch of ``payload_bytes`` (this rank's input) on the channel of
        ``group``.
        """
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


@dataclass(frozen=True, slots=True)
class Exposed:
    """A collective that is not hidden, and why.

    ``launch``: node id, the first of a bucket. ``us``: how long the compute stream waits for it.
    ``reason``: "data" (it starts as soon as what it depends on has finished), "channel" (its
    channel was busy with others from then on), "memory cap" (its result would not have fitted any
    earlier), "at the bound" (no schedule is shorter, whatever this collective does), or "order"
    (none of these: it could have started earlier, but no better schedule was found).
    """

    launch: int
    us: float
    reason: str


@dataclass(frozen=True, slots=True)
class Solution:
    """An order and buckets, and what they are worth.

    Times in microseconds. ``bound_us``: no schedule is shorter (``lower_bound.py``).
    ``own_bound_us``: the same, sharper. ``gap``: ``makespan_us / bound_us - 1``.
    ``cap_bytes``: the memory cap that was asked for. ``peak_bytes`` exceeds it only if the
        program's own order does and nothing leaner was found; then it is the least found.
        ``strategy``: what found it.
    """

    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    makespan_us: float
    bound_us: float
    own_bound_us: float
    peak_bytes: int
    cap_bytes: int
    exposed_us: float
    original_makespan_us: float
    original_peak_bytes: int
    strategy: str
    reasons: tuple[Exposed, ...]

    @property
    def gap(self) -> float:
        """Most that the makespan may be above the best possible one, as a share of the bound; 0
        where it is best.
        """
        return self.makespan_us / self.bound_us - 1 if self.bound_us > 0 else 0.0

    @property
    def within_cap(self) -> bool:
        """False only if no schedule within the cap was found; then the peak is the least found."""
        return self.peak_bytes <= self.cap_bytes

    @property
    def schedule(self) -> Schedule:
        """Order and buckets alone."""
        return Schedule(self.order, self.buckets)


_LEAST_MIB = 1e-9  # a thousandth of a byte; with less, slopes would leave the range of floats


def check_problem(problem: Problem) -> None:
    """Raise ``ProblemError`` unless every rule of ``problem.py`` holds. Linear in nodes and
    edges.
    """
    _check_tables(problem)
    for i, node in enumerate(problem.nodes):
        _check_references(problem, i, node)
        _check_numbers(i, node)
    for i, node in enumerate(problem.nodes):
        if any(d >= i for d in node.deps):
            _refuse_order(problem)
        if node.alias is not None and node.alias >= i:
            raise ProblemError(
                f"Node {i} shares the memory of node {node.alias}, which is not before it."
            )
        if node.launch is not None and node.launch >= i:
            raise ProblemError(f"Wait {i} stands before launch {node.launch}, which it waits for.")


def _check_tables(problem: Problem) -> None:
    if not _positive(problem.copy_bytes_per_us):
        raise ProblemError(
            f"copy_bytes_per_us is {problem.copy_bytes_per_us}, not a positive number."
        )
    if not (math.isfinite(problem.compute_stretch) and problem.compute_stretch >= 1.0):
        raise ProblemError(f"compute_stretch is {problem.compute_stretch}, not a number from 1 on.")
    for group, size in problem.group_size.items():
        if size < 1:
            raise ProblemError(f"Group {group!r} has {size} ranks.")
    for group, tables in problem.links.items():
        if not tables:
            raise ProblemError(f"Group {group!r} has no link table.")
        for op, points in tables.items():
            if len(points) < 2:
                raise ProblemError(f"The link table of {op} on group {group!r} needs two points.")
            sizes = [x for x, _ in points]
            if sizes[0] < _LEAST_MIB or any(b <= a for a, b in itertools.pairwise(sizes)):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} is not by growing size."
                )
            if any(not math.isfinite(us) or us < 0 for _, us in points):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} has a negative cost."
                )
            if any(b[1] < a[1] for a, b in itertools.pairwise(points)):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} has a larger payload that costs "
                    "less."
                )


def _check_references(problem: Problem, i: int, node: Node) -> None:
    count = len(problem.nodes)
    if node.kind not in KINDS:
        raise ProblemError(
            f"Node {i} is of unknown kind {node.kind!r}; kinds are {', '.join(KINDS)}."
        )
    for key, named in (("deps", node.deps), ("alias", (node.alias,)), ("launch", (node.launch,))):
        for other in named:
            if other is not None and not 0 <= other < count:
                raise ProblemError(
                    f"Node {i} names node {other} in {key!r}; there are {count} nodes."
                )
    if node.kind == "launch" and node.group not in problem.links:
        raise ProblemError(f"Launch {i} is on unknown group {node.group!r}: it has no link table.")
    if node.kind == "launch" and node.group not in problem.group_size:
        raise ProblemError(f"Launch {i} is on unknown group {node.group!r}: it has no group size.")
    if node.launch is not None and node.kind != "wait":
        raise ProblemError(f"Node {i} waits for launch {node.launch} but is of kind {node.kind!r}.")
    if node.launch is not None and problem.nodes[node.launch].kind != "launch":
        raise ProblemError(f"Wait {i} waits for node {node.launch}, which is no launch.")


def _check_numbers(i: int, node: Node) -> None:
    for key, value in (("us", node.us), ("bytes", node.bytes), ("payload", node.payload)):
        if not math.isfinite(value) or value < 0:
            raise ProblemError(f"Node {i} has a negative or infinite cost: {key!r} is {value}.")
    if node.us > 0 and node.kind != "compute":
        raise ProblemError(f"Node {i} is of kind {node.kind!r} but takes {node.us} us of compute.")


def _refuse_order(problem: Problem) -> None:
    try:
        TopologicalSorter({i: node.deps for i, node in enumerate(problem.nodes)}).prepare()
    except CycleError as error:
        path = " -> ".join(str(i) for i in error.args[1])
        raise ProblemError(f"The dependencies have a cycle: {path}.") from None
    late = next((i, d) for i, n in enumerate(problem.nodes) for d in n.deps if d >= i)
    raise ProblemError(
        f"Node {late[0]} stands before its dependency {late[1]}: nodes must be in program order."
    )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
