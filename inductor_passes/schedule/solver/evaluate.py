"""Evaluate a schedule: validity, makespan, exposed time and its reasons, peak memory.

Independent of the solver: it takes a problem and a schedule and runs them through the simulator.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.solver.problem import Exposed, Problem, Schedule
from inductor_passes.schedule.solver.tasks import Tasks
from inductor_passes.simulate.execution import Program, execute, live_bytes


@dataclass(frozen=True, slots=True)
class Judgement:
    """Times in microseconds.

    ``exposed_by_launch``: exposed time of each launch that has any; a bucket's is its first
        member's.
    ``start_us``, ``end_us``: by node id, on the channel for launches, on the compute stream else.
    ``live_bytes``: by node id, what is alive while it runs.
    """

    makespan_us: float
    exposed_us: float
    peak_bytes: int
    exposed_by_launch: dict[int, float]
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    live_bytes: tuple[int, ...]


def judge(problem: Problem, schedule: Schedule) -> Judgement:
    """Validate and run a schedule. Raises ``ProblemError`` that says which rule it breaks."""
    check_schedule(problem, schedule)
    entries = _Entries(problem, schedule)
    execution = execute(entries.program)
    live = live_bytes(entries.fresh, entries.last_use())
    run_at = entries.runs_at
    return Judgement(
        makespan_us=execution.makespan_us,
        exposed_us=execution.exposed_us,
        peak_bytes=max(live, default=0),
        exposed_by_launch={
            i: execution.exposed[entry]
            for i, entry in enumerate(run_at)
            if execution.exposed[entry] > 0 and entries.node_at[entry] == i
        },
        start_us=tuple(execution.start[entry] for entry in run_at),
        end_us=tuple(execution.end[entry] for entry in run_at),
        live_bytes=tuple(live[entry] for entry in run_at),
    )


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raise ``ProblemError`` unless the schedule obeys every rule of execution."""
    nodes = problem.nodes
    if sorted(schedule.order) != list(range(len(nodes))):
        raise ProblemError("The order does not hold every node exactly once.")
    position = [0] * len(nodes)
    for p, i in enumerate(schedule.order):
        position[i] = p
    waits: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for d in node.deps:
            if position[d] >= position[i]:
                raise ProblemError(f"Node {i} stands before its dependency {d}.")
        if node.launch is not None:
            if position[node.launch] >= position[i]:
                raise ProblemError(f"Wait {i} stands before its launch {node.launch}.")
            waits.setdefault(node.launch, []).append(i)
    owner: dict[int, int] = {}
    for b, members in enumerate(schedule.buckets):
        for i in members:
            if not 0 <= i < len(nodes) or nodes[i].kind != "launch":
                raise ProblemError(f"Bucket {b} holds node {i}, which is no launch.")
            if i in owner:
                raise ProblemError(f"Launch {i} is in two buckets.")
            owner[i] = b
        if len({nodes[i].merge_key for i in members}) > 1:
            raise ProblemError(f"Bucket {b} mixes groups, operations, dtypes or reduce operations.")
        ends = [wait for i in members for wait in waits.get(i, ())]
        for ids, what in ((members, "members"), (ends, "waits")):
            places = sorted(position[i] for i in ids)
            if places and places[-1] - places[0] != len(places) - 1:
                raise ProblemError(f"The {what} of bucket {b} do not stand next to each other.")
    # Members are neighbours and dependencies point backwards: a path between two of them would have
    # to run through members alone.
    for i, b in owner.items():
        if any(owner.get(d) == b for d in nodes[i].deps):
            raise ProblemError(f"Launch {i} depends on another launch of its bucket.")


class _Entries:
    """A schedule as entries of a program: the nodes in order, and the copies into and out of
    buckets.

    ``runs_at``: node -> the entry at which it runs; all members of a bucket run at their first
        one's.
    ``node_at``: the reverse, for nodes that run themselves; else -1. ``fresh``: bytes each entry
        brings to life.
    """

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self._problem = problem
        self._buckets = [members for members in schedule.buckets if len(members) > 1]
        self._bucket_of = {i: b for b, members in enumerate(self._buckets) for i in members}
        self._packed: dict[int, int] = {}  # bucket -> the entry that holds its copy
        self._waited: dict[int, int] = {}  # bucket -> the entry of its last wait so far
        self._entry = [0] * len(problem.nodes)  # node -> the entry that stands in its place
        self.program = Program(
            *([], [], [], []),
            stretch=problem.compute_stretch,
        )
        self.fresh: list[int] = []
        self.runs_at = [0] * len(problem.nodes)
        self.node_at: list[int] = []
        for i in schedule.order:
            if problem.nodes[i].kind == "launch":
                self._launch(i)
            elif problem.nodes[i].launch is not None:
                self._wait(i)
            elif problem.nodes[i].blocks:
                node = problem.nodes[i]
                itself = (len(self.fresh),)
                self._place(i, channel=node.group, link_us=node.us, awaits=itself)
            else:
                self._place(i, compute_us=problem.nodes[i].us)

    def last_use(self) -> list[int]:
        """For each entry, the last one that reads its bytes."""
        last = list(range(len(self.fresh)))
        owners: list[int] = []
        for i, node in enumerate(self._problem.nodes):
            # A reader of a view keeps the memory of what the view shows. Aliases point backwards,
            # so that one pass resolves chains of them.
            owners.append(i if node.alias is None else owners[node.alias])
            reader = self._entry[i]
            for d in node.deps:
                owner = self._entry[owners[d]]
                if last[owner] < reader:
                    last[owner] = reader
        for b, entry in self._packed.items():
            # The packed copy is read by the collective until its last wait: without one in the
            # graph it stays to the end.
            last[entry] = self._waited.get(b, len(last) - 1)
        return last

    def _launch(self, i: int) -> None:
        node = self._problem.nodes[i]
        b = self._bucket_of.get(i)
        if b in self._packed:
            self._place(i)
            # The first member stands right behind its bucket's copy, and carries the launch of all
            # of them.
            self.runs_at[i] = self._packed[b] + 1
            return
        payload = node.payload
        if b is not None:
            members = self._buckets[b]
            payload = sum(self._problem.nodes[m].payload for m in members)
            self._packed[b] = self._add(self._problem.pack_us(members), fresh=payload)
        self._place(
            i, channel=node.group, link_us=self._problem.link_us(node.group, node.op, payload)
        )

    def _wait(self, i: int) -> None:
        launch = self._problem.nodes[i].launch
        assert launch is not None
        b = self._bucket_of.get(launch)
        unpack_us = 0.0
        # A bucket is unpacked once, at its first wait; the later waits find the channel's work
        # done.
        if b is not None and b not in self._waited:
            unpack_us = self._problem.unpack_us(self._buckets[b])
        self._place(i, compute_us=unpack_us, awaits=(self.runs_at[launch],))
        if b is not None:
            self._waited[b] = self._entry[i]

    def _place(
        self,
        i: int,
        compute_us: float = 0.0,
        channel: str = "",
        link_us: float = 0.0,
        awaits: tuple[int, ...] = (),
    ) -> None:
        node = self._problem.nodes[i]
        counted = node.kind not in ("input", "output") and node.alias is None
        # Inputs are alive before the graph and outputs after it, whatever the order: neither
        # changes a comparison of schedules, so neither is counted.
        entry = self._add(compute_us, node.bytes if counted else 0, channel, link_us, awaits)
        self._entry[i] = self.runs_at[i] = entry
        self.node_at[entry] = i

    def _add(
        self,
        compute_us: float,
        fresh: int,
        channel: str = "",
        link_us: float = 0.0,
        awaits: tuple[int, ...] = (),
    ) -> int:
        self.program.compute_us.append(compute_us)
        self.program.channel.append(channel)
        self.program.link_us.append(link_us)
        self.program.awaits.append(awaits)
        self.fresh.append(fresh)
        self.node_at.append(-1)
        return len(self.fresh) - 1


NEGLIGIBLE_US = 1.0


def explain_exposed(
    tasks: Tasks, schedule: Schedule, judged: Judgement, bound_us: float, cap_bytes: int
) -> tuple[Exposed, ...]:
    """One entry per exposed launch, in the order of the problem's nodes. See ``Exposed`` for the
    reasons.
    """
    # First of all reasons: at the bound nothing that is done about this collective can shorten the
    # step.
    at_bound = judged.makespan_us <= bound_us * (1 + 1e-9)
    members = {bucket[0]: bucket for bucket in schedule.buckets}
    position = {i: p for p, i in enumerate(schedule.order)}
    channels: dict[str, _Channel] = {}
    exposed = []
    for launch, us in judged.exposed_by_launch.items():
        together = members.get(launch, (launch,))
        ready = max(_inputs_ready(tasks, judged, i) for i in together)
        start = judged.start_us[launch]
        group = tasks.problem.nodes[launch].group
        if group not in channels:
            channels[group] = _Channel(tasks, schedule, judged, group)
        channel = channels[group]
        if at_bound:
            reason = "at the bound"
        elif start - ready <= NEGLIGIBLE_US:
            reason = "data"
        elif channel.idle_us(ready, start) <= NEGLIGIBLE_US:
            reason = "channel"
        else:
            # Right before it, would its result have fitted?
            size = sum(tasks.alloc[tasks.task_of[i]] for i in together)
            # A fact of this schedule and not a proof: another order before the launch might have
            # had less memory alive.
            before = judged.live_bytes[schedule.order[position[launch] - 1]]
            reason = "order" if before + size <= cap_bytes else "memory cap"
        exposed.append(Exposed(launch, us, reason))
    return tuple(exposed)


def _inputs_ready(tasks: Tasks, judged: Judgement, launch: int) -> float:
    """Return the time at which all that a launch's task depends on had finished."""
    t = tasks.task_of[launch]
    ready = 0.0
    for p in tasks.preds[t]:
        last = tasks.launch[p] if tasks.launch[p] >= 0 else tasks.before[p][-1]
        ready = max(ready, judged.end_us[last])
    return ready


class _Channel:
    """Busy times of one group's channel."""

    def __init__(self, tasks: Tasks, schedule: Schedule, judged: Judgement, group: str) -> None:
        nodes = tasks.problem.nodes
        # A bucket's members all carry its times: one entry is enough.
        spans = dict.fromkeys(
            (judged.start_us[i], judged.end_us[i])
            for i in schedule.order
            if nodes[i].kind == "launch" and nodes[i].group == group
        )
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._busy = [0.0, *accumulate(end - start for start, end in spans)]

    def idle_us(self, begin: float, end: float) -> float:
        """Return how long the channel was idle between two times."""
        return end - begin - (self._busy_until(end) - self._busy_until(begin))

    def _busy_until(self, time: float) -> float:
        k = bisect_right(self._starts, time)
        if not k:
            return 0.0
        return self._busy[k] - max(0.0, self._ends[k - 1] - time)
