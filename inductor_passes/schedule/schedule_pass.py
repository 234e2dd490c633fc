"""Order and bucket a whole graph, by this rank's schedule or as a plan of another rank says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from graphlib import CycleError

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.errors import CannotFollowError
from inductor_passes.graph.collectives import MEMBERS, argument, group_name, is_launch, waits_of
from inductor_passes.graph.dependencies import barriers, shows_that_ranks_differ, sorted_behind
from inductor_passes.graph.edit import TrialCopy
from inductor_passes.graph_pass import GraphPass, Numerics, PassContext, PassStats, ScheduleOptions
from inductor_passes.ranks.collective_trace import LaunchPlan, what
from inductor_passes.records import LEFT_ALONE, ExposedRecord, ScheduleRecord
from inductor_passes.schedule.apply import MergedLaunches, apply, read_sizes_of_inputs
from inductor_passes.schedule.extract import Extracted, extract, runtime_bytes
from inductor_passes.schedule.postconditions import Before, check
from inductor_passes.schedule.solver.evaluate import check_schedule
from inductor_passes.schedule.solver.problem import MERGED_OPS, Problem, Solution
from inductor_passes.schedule.solver.solve import solve_once
from inductor_passes.simulate import Timeline, simulate


class FollowPlan(GraphPass):
    """Put launches in a plan's order and merge those that it merges; the rest keeps its place.

    The scheduler runs afterwards. It decides where compute goes and keeps the order of launches.

    Requires: launches that bear the numbers of the program's (``ranks/collective_trace.py``).
    Ensures:  what ``Schedule`` ensures.
    Stats:    ``launches``, ``merged`` (launches in buckets). Raises CannotFollowError if the graph
              has not the launches of the plan, or needs them in another order.
    """

    name = "follow_plan"
    numerics = Numerics.REASSOCIATING
    keeps_launch_order = False

    def __init__(self, cost: CostModel, plan: LaunchPlan) -> None:
        self.cost = cost
        self.plan = plan

    def digest(self) -> str:
        return self.plan.text

    def run(self, graph: fx.Graph) -> PassStats:
        read_sizes_of_inputs(graph)
        wanted = self._nodes(graph)
        extracted = extract(graph, self.cost)
        buckets = [members for members in wanted if len(members) > 1]
        order = _order(extracted, wanted)
        before = Before.of(extracted)
        coalesced = [
            "coalesced" in planned.what
            for planned, members in zip(self.plan.launches, wanted, strict=True)
            if len(members) > 1
        ]
        made = apply(graph, order, buckets, self.cost, coalesced)
        check(before, graph, made, self.name)
        counters = {"launches": len(wanted), "merged": sum(map(len, buckets))}
        return PassStats(True, counters)

    def _nodes(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """The nodes of each launch of the plan."""
        by_first = {
            node.meta[MEMBERS][0]: node
            for node in graph.nodes
            if is_launch(node) and node.meta.get(MEMBERS)
        }
        found = []
        for planned in self.plan.launches:
            members: list[fx.Node] = []
            left = list(planned.members)
            while left:
                node = by_first.pop(left[0], None)
                covers = () if node is None else node.meta[MEMBERS]
                if node is None or tuple(left[: len(covers)]) != tuple(covers):
                    raise CannotFollowError(f"The graph has no launch of its own for {planned}.")
                members.append(node)
                del left[: len(covers)]
            # Of the rank that planned, a pass may have made one launch of another kind or type, and
            # not of this one.
            if len({(what(node), group_name(node)) for node in members}) > 1:
                here = " and ".join(dict.fromkeys(map(what, members)))
                raise CannotFollowError(f"The plan merges {planned}, which are {here} here.")
            if len(members) > 1 and not all(map(_has_equal_shares, members)):
                raise CannotFollowError(
                    f"The plan merges {planned}, of which one has unequal shares."
                )
            found.append(members)
        if by_first:
            raise CannotFollowError(f"The plan leaves out {len(by_first)} launches of the graph.")
        return found


def _has_equal_shares(launch: fx.Node) -> bool:
    """Return whether an exchange gives every rank as much; true for other collectives."""
    shares = (argument(launch, name) for name in ("input_split_sizes", "output_split_sizes"))
    return all(len(set(each)) < 2 for each in shares if isinstance(each, (list, tuple)))


def _order(extracted: Extracted, wanted: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes with launches in the order wanted, members of a bucket and their waits side by
    side.
    """
    place = {node: i for i, node in enumerate(extracted.nodes) if node is not None}
    head = list(range(len(extracted.nodes)))  # of what must stand together
    together: dict[int, list[int]] = {}
    for members in wanted:
        if len(members) < 2:
            continue
        waits = [wait for member in members for wait in waits_of(member)]
        if len(waits) != len(members):
            raise CannotFollowError("A launch that the plan merges has not one wait of its own.")
        for side in (members, waits):
            ids = sorted(place[node] for node in side)
            together[ids[0]] = ids
            for i in ids:
                head[i] = ids[0]
    behind: dict[int, set[int]] = {}
    launches = [place[members[0]] for members in wanted]
    for earlier, later in itertools.pairwise(launches):
        behind.setdefault(head[later], set()).add(head[earlier])
    for i, number in enumerate(extracted.problem.nodes):
        behind.setdefault(head[i], set()).update(head[d] for d in number.deps)
    order = []
    for i in _sorted(behind):
        order.extend(together.get(i, [i]))
    return extracted.order(order)


def _sorted(behind: dict[int, set[int]]) -> list[int]:
    if any(i in sources for i, sources in behind.items()):
        raise CannotFollowError("A launch that the plan merges needs another one of its bucket.")
    try:
        return sorted_behind(behind)
    except CycleError:
        raise CannotFollowError(
            "The graph needs its launches in another order than the plan's."
        ) from None


# A graph that gains less is not worth another order.
LEAST_GAIN = 0.01
EXTRA_BYTES = 2**30
LEAST_BYTES = 2**15  # less is not worth a launch
# Key of an output node's meta: the cap on peak memory, told by a pass that has changed the
# program's own.
CAP_BYTES = "inductor_passes_cap_bytes"
MOVING_OPS = ("all_gather", "all_to_all")  # what can be merged without another order of additions


@dataclasses.dataclass(frozen=True, slots=True)
class _ExtraMemory:
    """Memory that a schedule may take above the program's order: the larger of bytes and a share
    of its peak.
    """

    extra_bytes: int
    extra_ratio: float

    def cap_bytes(self, peak_bytes: int) -> int:
        """Return the cap, given the peak of the program's order."""
        return peak_bytes + max(int(self.extra_ratio * peak_bytes), self.extra_bytes)


class ScheduleGraph(GraphPass):
    """Choose the order of compute, collectives and waits, and which collectives to merge.

    The graph becomes a schedule problem. The pass applies the solution if the predicted step gets
    shorter by at least 1 %, and otherwise leaves the graph as it is. A node that has effects or
    writes memory keeps its place among the nodes that touch the same. Where ranks may hold
    different graphs, launches keep the program's order and none is merged.

    Requires: a graph whose collectives have a cost.
    Ensures:  every node calls what it did, and comes after every node that it had to come after;
              launches and waits of a bucket are replaced by one launch of their payload;
              ``postconditions.py`` checks all of it.
    Stats:    ``launches``, ``buckets``, ``merged`` (launches in buckets).
    """

    name = "schedule"
    schedules = True
    keeps_launch_order = False

    def __init__(
        self,
        cost: CostModel,
        options: ScheduleOptions = ScheduleOptions(),
        *,
        exact: bool = False,
        ranks_differ: bool = False,
    ) -> None:
        self.cost = cost
        self.options = options
        self.exact = exact
        self.ranks_differ = ranks_differ
        # A bucket of reductions may add in another order.
        self.numerics = Numerics.BITWISE if exact else Numerics.REASSOCIATING

    @classmethod
    def build(cls, context: PassContext) -> ScheduleGraph:
        return cls(
            context.cost,
            context.schedule,
            exact=context.exact,
            ranks_differ=context.ranks_differ,
        )

    def digest(self) -> str:
        return f"{self.options} {self.exact} {self.ranks_differ} {self.cost.digest()}"

    def run(self, graph: fx.Graph) -> PassStats:
        start = time.perf_counter()
        extracted = self.extract(graph)
        problem = extracted.problem
        before = Before.of(extracted)
        solution, refused = self.plan(graph, extracted)
        buckets: list[MergedLaunches] = []
        if not refused:
            buckets = self.apply(graph, extracted, solution)
            check(before, graph, buckets, self.name)
        launches = sum(node.kind == "launch" for node in problem.nodes)
        record = ScheduleRecord(
            decision=refused or f"scheduled: {solution.strategy}",
            nodes=len(before.calls),
            launches=launches,
            buckets=len(buckets),
            makespan_before_us=solution.original_makespan_us,
            makespan_after_us=solution.original_makespan_us if refused else solution.makespan_us,
            bound_us=solution.bound_us,
            peak_before_bytes=solution.original_peak_bytes,
            peak_after_bytes=solution.original_peak_bytes if refused else solution.peak_bytes,
            cap_bytes=solution.cap_bytes,
            seconds=time.perf_counter() - start,
            exposed=() if refused else _exposed(extracted, solution, buckets),
            fixed=tuple(node.name for node in barriers(graph)),
        )
        return PassStats(
            changed=not refused,
            counters={
                "launches": launches,
                "buckets": len(buckets),
                "merged": sum(len(bucket.members) for bucket in buckets),
            },
            schedule=record,
        )

    def extract(self, graph: fx.Graph) -> Extracted:
        """Return the schedule problem of a graph."""
        differ = self.ranks_differ or shows_that_ranks_differ(graph)
        merge = () if differ else MOVING_OPS if self.exact else MERGED_OPS
        return extract(graph, self.cost, ranks_differ=differ, merge=merge)

    def solve(
        self,
        problem: Problem,
        *,
        bucket: bool,
        extra_bytes: int = EXTRA_BYTES,
        extra_ratio: float | None = None,
    ) -> Solution:
        """The order and buckets to use, within ``extra_bytes`` of memory above the program's
        order.
        """
        ratio = self.options.extra_memory_ratio if extra_ratio is None else extra_ratio
        return solve_once(
            problem,
            extra_memory_ratio=ratio,
            extra_memory_bytes=extra_bytes,
            bucket=bucket,
        )

    def apply(
        self, graph: fx.Graph, extracted: Extracted, solution: Solution
    ) -> list[MergedLaunches]:
        """Rewrite the graph."""
        nodes = extracted.nodes
        buckets = [[n for i in b if (n := nodes[i]) is not None] for b in solution.buckets]
        return apply(graph, extracted.order(solution.order), buckets, self.cost)

    def forecast(self, graph: fx.Graph, extracted: Extracted) -> tuple[Solution, str]:
        """Return what ``plan`` most often does, without a look at what its buckets are in the
        graph.
        """
        before = functools.cache(functools.partial(simulate, graph, self.cost))
        extra_memory = self._extra_memory(graph, before)
        solution = self.solve(
            extracted.problem,
            bucket=self.options.bucket,
            extra_bytes=extra_memory.extra_bytes,
            extra_ratio=extra_memory.extra_ratio,
        )
        return solution, _why_not(solution)

    def plan(self, graph: fx.Graph, extracted: Extracted) -> tuple[Solution, str]:
        """Return a solution, and why it is not worth being applied, or ""; the graph stays as it
        is.
        """
        before = functools.cache(functools.partial(simulate, graph, self.cost))
        extra_memory = self._extra_memory(graph, before)
        solution = (
            self._merged(graph, extracted, extra_memory, before) if self.options.bucket else None
        )
        if solution is None:
            solution = self.solve(
                extracted.problem,
                bucket=False,
                extra_bytes=extra_memory.extra_bytes,
                extra_ratio=extra_memory.extra_ratio,
            )
            check_schedule(extracted.problem, solution.schedule)
        return solution, _why_not(solution)

    def peak_and_cap_bytes(self, graph: fx.Graph) -> tuple[int, int]:
        """Return the peak memory of the program's order, and the one that a schedule of the
        graph may have.
        """
        before = functools.cache(functools.partial(simulate, graph, self.cost))
        peak = before().peak_bytes
        return peak, self._extra_memory(graph, before).cap_bytes(peak)

    def _extra_memory(self, graph: fx.Graph, before: Callable[[], Timeline]) -> _ExtraMemory:
        extra, ratio = self.options.extra_memory_bytes, self.options.extra_memory_ratio
        if (cap := graph.output_node().meta.get(CAP_BYTES)) is not None:
            return _ExtraMemory(cap - before().peak_bytes, -1.0)
        if extra is None:
            runtime = runtime_bytes(graph, before)
            extra = EXTRA_BYTES if runtime is None else max(runtime, LEAST_BYTES)
        return _ExtraMemory(extra, ratio)

    def _merged(
        self,
        graph: fx.Graph,
        extracted: Extracted,
        extra_memory: _ExtraMemory,
        before: Callable[[], Timeline],
    ) -> Solution | None:
        """A solution whose buckets, if it has any, pay and fit in the graph; None if there is none.

        The problem prices the copies of buckets by their bytes alone, and not their memory; the
        graph shows both. Where those of large buckets do not fit, smaller ones are tried.
        """
        for part in (1, 2, 4):
            extra = (
                extra_memory.extra_bytes // part
                if extra_memory.extra_bytes > 0
                else extra_memory.extra_bytes
            )
            solution = self.solve(
                extracted.problem,
                bucket=True,
                extra_bytes=extra,
                extra_ratio=extra_memory.extra_ratio,
            )
            check_schedule(extracted.problem, solution.schedule)
            if not solution.buckets:
                return solution
            peak = before().peak_bytes
            after = self._applied(graph, extracted, solution)
            if not self._pays(solution, after):
                return None
            if after.peak_bytes <= extra_memory.cap_bytes(peak):
                return solution
        return None

    def _applied(self, graph: fx.Graph, extracted: Extracted, solution: Solution) -> Timeline:
        """A solution as it runs, seen on a copy of the graph."""
        # On a copy, because a bucket's real memory shows only in the graph, and a rejected trial
        # must leave no trace.
        trial = TrialCopy(graph)
        twin = trial.twins()
        nodes = tuple(None if node is None else twin[node] for node in extracted.nodes)
        self.apply(trial.graph, dataclasses.replace(extracted, nodes=nodes), solution)
        return simulate(trial.graph, self.cost)

    def _pays(self, solution: Solution, after: Timeline) -> bool:
        return 1 - after.makespan_us / solution.original_makespan_us >= LEAST_GAIN


def _why_not(solution: Solution) -> str:
    """Why a solution is not worth being applied, or ""."""
    gain = 1 - solution.makespan_us / max(solution.original_makespan_us, 1e-9)
    return (
        ""
        if gain >= LEAST_GAIN
        else f"{LEFT_ALONE}: {gain:.1%} to gain, less than {LEAST_GAIN:.0%}"
    )


def _exposed(
    extracted: Extracted, solution: Solution, buckets: Sequence[MergedLaunches]
) -> tuple[ExposedRecord, ...]:
    """List the exposed launches of the scheduled graph and why they are, by the names that they
    have there.
    """
    merged = {member: bucket.launch for bucket in buckets for member in bucket.members}
    found = []
    for item in solution.reasons:
        node = extracted.nodes[item.launch]
        assert node is not None
        found.append(ExposedRecord(merged.get(node, node).name, item.us, item.reason))
    return tuple(found)
