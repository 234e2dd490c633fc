"""List scheduling with one compute stream, a channel per group, buckets, and a memory budget.

Time runs forwards. Whenever the compute stream is free, the ready task of least latest start runs;
before it starts, every channel that would fall idle under it is given its most urgent launches. The
state is in small classes: what becomes ready when, which compute may run, which launches queue
where, how far the program is, what has run when, and how much memory is live (``live_memory.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from inductor_passes.schedule.solver.bucketing import (
    MOST_BYTES,
    MOST_MEMBERS,
    Bucket,
    Collector,
    Enough,
    Entry,
    Merger,
)
from inductor_passes.schedule.solver.live_memory import LiveMemory
from inductor_passes.schedule.solver.problem import Schedule
from inductor_passes.schedule.solver.tasks import Tasks
from inductor_passes.simulate.execution import slowed

# Larger than any task number, and longer than any schedule in parts of its bound: as a window or
# horizon they switch the limit off.
ANY = 1 << 60
ALWAYS = 1e9


@dataclass(frozen=True, slots=True)
class Rules:
    """One member of the portfolio.

    Times are parts of the lower bound, so that a rule means the same on small and large graphs.

    ``priority``: which backward run sets the latest starts: by "program" order, by longest "path"
        from the start, or "mixed". ``window``: how many tasks ahead of the oldest compute still to
        do may run.
    ``launch_ahead``: how far before its latest start a launch that waits for nothing may go.
    ``compute_ahead``: up to which distance compute counts as urgent; beyond, it goes by program
        order, and compute that waits for nothing, such as recomputation, is held back.
    ``rise_ahead``: how far ahead memory is kept free for the program's own order.
    ``merge``: weight of link time against copying when launches are merged; 0 never merges.
    ``busy``: for which part of the lower bound a channel may be busy before launches that merging
        would help wait for one another (``bucketing.py``); 0 never holds any back.
    ``patience``: idle for a more urgent task that becomes ready within this part of the other one's
        time.
    """

    priority: str
    window: int = ANY
    launch_ahead: float = 0.02
    compute_ahead: float = 0.02
    rise_ahead: float = 0.02
    merge: float = 0.0
    busy: float = 0.0
    patience: float = 0.0


# Chosen by greedy cover on backward graphs of Llama-3-8B and DeepSeek-V3 with their compute, links
# and floors made faster and slower, which turns them compute bound or bound by one channel or
# another. The third and fourth stay close to the program's order, for graphs without memory to
# spare. The last three are for links whose floors are long, as those of thousands of ranks; where
# none is, they are left out.
PORTFOLIO = (
    Rules("program", merge=1.0, patience=0.5),
    Rules("program", launch_ahead=0.005, rise_ahead=0.005, merge=0.3, patience=0.5),
    Rules("program", launch_ahead=0.08, compute_ahead=0.08, rise_ahead=ALWAYS),
    Rules("program", window=0, launch_ahead=0.08, compute_ahead=0.0, rise_ahead=0.3),
    Rules(
        "program", launch_ahead=0.08, compute_ahead=0.005, rise_ahead=0.005, merge=0.3, patience=0.5
    ),
    Rules("program", window=640, launch_ahead=0.08, compute_ahead=ALWAYS, patience=0.5),
    Rules("mixed", launch_ahead=0.3, compute_ahead=0.0),
    Rules("mixed", window=80, compute_ahead=ALWAYS),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0),
    Rules("mixed", window=160, compute_ahead=ALWAYS, rise_ahead=0.08, merge=1.0, patience=0.5),
    Rules("path", launch_ahead=0.08, compute_ahead=0.08),
    Rules("program", merge=1.0, busy=0.75, patience=0.5),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0, busy=0.3),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0, busy=0.9),
)


class Channels:
    """Hold one channel per group. ``free[c]``: when channel c is free (us).

    Launches that are to go (bound) and those that could go at any time (``Tasks.loose``)
    queue apart. Launches that were started from elsewhere (``done``) stay in the queue and are
    skipped.
    """

    def __init__(self, tasks: Tasks, done: list[bool]) -> None:
        self._tasks, self._done = tasks, done
        groups = sorted({group for group in (*tasks.group, *tasks.blocks) if group})
        self.number = {group: c for c, group in enumerate(groups)}
        self.free = [0.0] * len(groups)
        self._queues: list[tuple[list[Entry], list[Entry]]] = [([], []) for _ in groups]

    def add(self, entries: Iterable[Entry]) -> None:
        """Launches may go."""
        for entry in entries:
            self.queue(entry)

    def queue(self, entry: Entry) -> None:
        """A launch may go."""
        t = entry[1]
        # A loose launch could go at time zero. In one queue with the others it would hide them
        # behind it, or go far too early and hold its result in memory for the whole step.
        heappush(self._queues[self.number[self._tasks.group[t]]][self._tasks.loose[t]], entry)

    def waiting(self) -> list[int]:
        """The channels for which launches queue, or have queued."""
        return [c for c, (bound, loose) in enumerate(self._queues) if bound or loose]

    def queues(self, c: int) -> tuple[list[Entry], list[Entry]]:
        """The bound and the loose launches of channel c, as heaps whose first may go."""
        for queue in self._queues[c]:
            while queue and self._done[queue[0][1]]:
                heappop(queue)
        return self._queues[c]

    def bound(self) -> Iterator[int]:
        """All bound launches, most urgent first on each channel; the caller may launch them."""
        for queue, _ in self._queues:
            # A sorted copy, because the caller launches while it iterates, and a launch pops the
            # heap.
            for _, t in sorted(queue):
                if not self._done[t]:
                    yield t

    def next_free(self, now: float) -> float | None:
        """When the first busy channel for which launches queue is free."""
        busy = [at for c, at in enumerate(self.free) if at > now and any(self.queues(c))]
        return min(busy, default=None)


class Progress:
    """Which tasks are ``done``, and which compute is next.

    ``frontier``: the first compute of the program that is not done. ``at_us``: latest start of the
    most urgent compute that may run, is not done and depends on something; the schedule is on time
    while its clock, counted from the same origin, has not passed it. ``left``: how many tasks are
    not done. Compute more than ``window`` tasks beyond the frontier may not run.
    """

    def __init__(self, tasks: Tasks, latest: list[float], window: int) -> None:
        self._latest, self._window = latest, window
        self.done = [False] * tasks.count
        self.left = tasks.count
        self.frontier = 0
        # What gives memory back does so when its copy is done, however far the program is.
        self._passed_over = [
            launch >= 0 or alloc < 0
            for launch, alloc in zip(tasks.launch, tasks.alloc, strict=True)
        ]
        self.at_us = min(latest, default=0.0)
        # Floating compute is left out: it can run at any time, so that its latest start says
        # nothing about how far the schedule has come.
        bound = [t for t in range(tasks.count) if tasks.launch[t] < 0 and not tasks.floating[t]]
        self._by_urgency = sorted(bound, key=latest.__getitem__, reverse=True)
        if self._by_urgency:
            self.at_us = latest[self._by_urgency[-1]]
        self._too_far: list[int] = []  # of these, what may not run yet
        self._come_near: list[Entry] = []  # what was, and is no longer

    def advance(self) -> None:
        """Look past what is done."""
        done, passed_over, waiting = self.done, self._passed_over, self._by_urgency
        # Both pointers only move forwards: over a whole schedule this is linear in tasks.
        frontier = self.frontier
        while frontier < len(done) and (done[frontier] or passed_over[frontier]):
            frontier += 1
        self.frontier = frontier
        farthest, too_far, near = frontier + self._window, self._too_far, self._come_near
        while too_far and too_far[0] <= farthest:
            t = heappop(too_far)
            heappush(near, (self._latest[t], t))
        while waiting and (done[waiting[-1]] or waiting[-1] > farthest):
            t = waiting.pop()
            if not done[t]:
                heappush(too_far, t)
        while near and done[near[0][1]]:
            heappop(near)
        if waiting:
            self.at_us = self._latest[waiting[-1]]
        if near and (near[0][0] < self.at_us or not waiting):
            self.at_us = near[0][0]


TRIED = 16  # tasks looked at for one that fits when memory is short
# Urgency (us) of what takes no time, behind that of what may give memory back.
FREES, AT_ONCE = -math.inf, -1e300


class ReadyCompute:
    """What the compute stream may run next. Numbers from ``tasks.count`` on are waits: they go
    first.

    Compute more than ``window`` tasks beyond the frontier is kept back, and so is compute that
    waits for nothing, such as recomputation, until its latest start is at most ``ahead_us`` away.
    """

    def __init__(
        self, tasks: Tasks, latest: list[float], progress: Progress, window: int, ahead_us: float
    ) -> None:
        self._tasks, self._latest, self._progress = tasks, latest, progress
        self._window, self._ahead_us = window, ahead_us
        self._urgent: list[Entry] = []  # with what has been run out of turn
        self._by_age: list[int] = []
        self._too_early: list[Entry] = []
        self._too_far: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._urgent)

    def add(self, number: int) -> None:
        """Compute, or a wait, has all that it depends on."""
        tasks, progress = self._tasks, self._progress
        if number >= tasks.count:
            # A wait goes before all compute: its launch has ended, so it costs at most the
            # unpacking, and it frees what the launch kept and makes its readers ready.
            heappush(self._urgent, (FREES, number))
        elif number > progress.frontier + self._window:
            heappush(self._too_far, number)
        elif (
            tasks.floating[number]
            and tasks.alloc[number] >= 0
            and self._latest[number] > progress.at_us + self._ahead_us
        ):
            heappush(self._too_early, (self._latest[number], number))
        else:
            self._offer(number)

    def _offer(self, t: int) -> None:
        # Compute that takes no time is never worth holding back either. Behind waits, which would
        # be hidden by one that does not fit; in front with them if it gives memory back. The task
        # number breaks ties, so that the choice depends on no hash order.
        at_once = FREES if self._tasks.alloc[t] < 0 else AT_ONCE
        heappush(self._urgent, (self._latest[t] if self._tasks.us[t] else at_once, t))
        heappush(self._by_age, t)

    def update(self) -> None:
        """Offer what progress has brought near."""
        progress, too_far, too_early = self._progress, self._too_far, self._too_early
        while too_far and too_far[0] <= progress.frontier + self._window:
            self.add(heappop(too_far))
        while too_early and too_early[0][0] <= progress.at_us + self._ahead_us:
            self._offer(heappop(too_early)[1])

    def choose(self, fits: Callable[[int], bool]) -> int:
        """The wait or the compute that should run, or -1: the most urgent, or else the oldest that
        fits.

        Running the program's oldest compute frees memory soonest.
        """
        count, urgent, done = self._tasks.count, self._urgent, self._progress.done
        # Lazy deletion: a task that ``_oldest`` ran out of turn is still in the heap of urgency.
        while urgent and urgent[0][1] < count and done[urgent[0][1]]:
            heappop(urgent)
        if not urgent:
            return -1
        key, chosen = urgent[0]
        soon = self._progress.at_us + self._ahead_us
        if key == FREES or (key <= soon and fits(chosen)):
            return chosen
        return self._oldest(fits)

    def _oldest(self, fits: Callable[[int], bool]) -> int:
        """Return the oldest that fits. Short of memory, the program's order is known to fit in
        the end.
        """
        chosen = -1
        passed: list[int] = []
        # A bounded look: with memory short, thousands of ready tasks may not fit, and each step
        # would look at all of them again.
        while self._by_age and chosen < 0 and len(passed) < TRIED:
            t = heappop(self._by_age)
            if self._progress.done[t]:
                continue
            passed.append(t)
            if fits(t):
                chosen = t
        for t in passed:
            heappush(self._by_age, t)
        return chosen

    def take_wait(self) -> None:
        """The wait that was chosen runs."""
        heappop(self._urgent)


class Step(NamedTuple):
    """Run ``tasks``: one of compute, or the launches of one bucket. ``waits``: wait for those."""

    tasks: tuple[int, ...]
    waits: bool = False


def expand(tasks: Tasks, steps: list[Step]) -> Schedule:
    """The order of the nodes. A launch that no step waits for is waited for right before its
    first reader.
    """
    nodes = tasks.problem.nodes
    # Inputs and their views cost nothing and depend on nothing else: first, they satisfy everybody.
    order = list(tasks.at_start)
    buckets: list[tuple[int, ...]] = []
    pending: dict[int, None] = {}

    def wait(launches: tuple[int, ...]) -> None:
        behind = sorted(i for t in launches for i in tasks.behind[t])
        # ``check_schedule`` wants the waits of a bucket next to each other; views of their results,
        # which stand among them here, go behind. The sort is stable and keeps both in their order.
        if len(launches) > 1:  # a bucket's waits are neighbours
            behind.sort(key=lambda i: nodes[i].launch is None)
        order.extend(behind)
        for t in launches:
            del pending[t]

    for step in steps:
        if step.waits:
            wait(step.tasks)
            continue
        for t in step.tasks:
            # A launch that no step waits for has no wait of its own in the steps: its wait is free
            # until somebody reads the result, so it goes as late as it can.
            for p in tasks.preds[t]:
                if p in pending:
                    wait((p,))
        for t in step.tasks:
            order.extend(tasks.before[t])
        launches = tuple(tasks.launch[t] for t in step.tasks if tasks.launch[t] >= 0)
        order.extend(launches)
        if len(launches) > 1:
            buckets.append(launches)
        pending.update((t, None) for t in step.tasks if tasks.launch[t] >= 0)
    # An order holds every node, also the wait of a result that nobody reads.
    for t in list(pending):
        wait((t,))
    return Schedule(tuple(order), tuple(buckets))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule over tasks: its steps, when each task ends, its makespan (us) and peak (bytes).

    ``stalls``: per launch, how long the compute stream stood still for it. One that was given up
    has no end.
    """

    steps: list[Step]
    stalls: dict[int, float]
    finish: list[float]
    makespan_us: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """``cap_bytes``: of live memory. ``rises``: per task, to be left free for the program's order.

    ``scale_us``: the time that parts in ``Rules`` are parts of. ``enough``: the payloads for which
        launches wait for one another (``bucketing.py``). ``worth_us``: a candidate that will end
        later than that is given up.
    ``tail``: per task, what must come after its end (us).
    """

    cap_bytes: int
    rises: list[int]
    scale_us: float
    enough: Enough
    worth_us: float = math.inf
    tail: Sequence[float] = ()


class History:
    """``now``: the clock of the compute stream (us). ``finish``: when each task has ended.

    ``stalls``: per launch, how long the compute stream stood still for it. ``late``: by how much
    compute has started after its latest start, at most.
    """

    def __init__(self, tasks: Tasks, channels: Channels) -> None:
        self._tasks, self._channels = tasks, channels
        self._slowdown = tasks.problem.compute_stretch
        self.now = self.late = 0.0
        self.steps: list[Step] = []
        self.stalls: dict[int, float] = {}
        self.finish = [0.0] * tasks.count

    def takes(self, us: float) -> float:
        """Time of ``us`` of compute from now on, beside what is on its way."""
        if self._slowdown <= 1.0:
            return us
        return slowed(us, max(self._channels.free, default=0.0) - self.now, self._slowdown)

    def compute(self, us: float, group: str = "") -> None:
        """Run ``us`` of compute, which may hold a group's channel."""
        # A collective that blocks needs its channel and the compute stream at once, so both clocks
        # meet at its end.
        if group:
            c, free = self._channels.number[group], self._channels.free
            self.now = free[c] = max(self.now, free[c]) + us
        # The test without a slowdown stands first: this line runs for every task of every
        # candidate.
        elif us:
            self.now += us if self._slowdown <= 1.0 else self.takes(us)

    def launch(self, members: list[int], link_us: float) -> float:
        """Launch a bucket and return when it ends."""
        c, free = self._channels.number[self._tasks.group[members[0]]], self._channels.free
        free[c] = max(self.now, free[c]) + link_us
        for t in members:
            self.finish[t] = free[c]
        self.steps.append(Step(tuple(members)))
        return free[c]

    def stand_still(self, at: float, t: int) -> None:
        """Let time pass until task t can run, or a wait; a task may owe it to a launch."""
        if at > self.now and t < self._tasks.count:
            # The compute stream stood still for the last predecessor to end. ``Search._urged``
            # moves such launches ahead in the next round.
            late = max(self._tasks.preds[t], key=self.finish.__getitem__)
            self.stalls[late] = self.stalls.get(late, 0.0) + at - self.now
        self.now = max(self.now, at)

    def end(self) -> float:
        """When everything has ended."""
        return max([self.now, *self._channels.free])


class Arrivals:
    """Tasks that wait for others, and waits (numbers from ``tasks.count`` on) that wait for
    their launches.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._missing = [len(before) for before in tasks.preds]
        self._ready_at = [0.0] * tasks.count
        self._coming: list[Entry] = [
            (0.0, t) for t, missing in enumerate(self._missing) if not missing
        ]
        self._arrived: list[tuple[int, int]] | None = None  # by need, once it is asked for

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def next(self) -> tuple[float, int]:
        """When the next becomes ready (us), and its number."""
        return self._coming[0]

    def add(self, number: int, at: float) -> None:
        """A task or wait will be ready at some time (us)."""
        heappush(self._coming, (at, number))

    def complete(self, t: int, at: float) -> None:
        """Record that task t ends at some time (us); its successors wait for it until then."""
        missing, ready_at = self._missing, self._ready_at
        for s in self._tasks.succs[t]:
            missing[s] -= 1
            # Not ``max``: a call a time is measurable here.
            if at > ready_at[s]:
                ready_at[s] = at
            # The last predecessor to complete is not always the last to end: a launch completes now
            # but ends later, so the latest end of all of them counts.
            if not missing[s]:
                heappush(self._coming, (ready_at[s], s))
                if self._arrived is not None:
                    heappush(self._arrived, (self._tasks.needed_by[s], s))

    def needed_first(self, done: list[bool]) -> int:
        """Of the tasks that wait for nothing and are not done, the one that is needed first."""
        if self._arrived is None:
            # Sorted, and so a heap. Most schedules never ask.
            self._arrived = sorted(
                (self._tasks.needed_by[t], t)
                for t, missing in enumerate(self._missing)
                if not missing and not done[t]
            )
        while done[self._arrived[0][1]]:
            heappop(self._arrived)
        return self._arrived[0][1]

    def due(self, now: float) -> list[int]:
        """Take those that are ready by now."""
        coming, found = self._coming, []
        while coming and coming[0][0] <= now:
            found.append(heappop(coming)[1])
        return found


def list_schedule(
    tasks: Tasks, merger: Merger, latest: list[float], limits: Limits, rules: Rules
) -> Candidate:
    """Schedule by ``latest`` starts (us, any origin). The peak may exceed the cap: the caller
    looks.
    """
    return _ListScheduler(tasks, merger, latest, limits, rules).run()


class _Wait(NamedTuple):
    """The end of a bucket, or of a launch that keeps what it reads: a step of its own."""

    urgency: float
    bucket: Bucket
    unpack_us: float


class _ListScheduler:
    """One schedule in the making.

    Numbers from ``tasks.count`` on stand for ``waits``.
    """

    def __init__(
        self, tasks: Tasks, merger: Merger, latest: list[float], limits: Limits, rules: Rules
    ) -> None:
        self.tasks, self.merger, self.latest = tasks, merger, latest
        self.limits, self.rules = limits, rules
        self.launch_ahead = rules.launch_ahead * limits.scale_us
        self.usable_bytes = limits.cap_bytes
        self.memory = LiveMemory(tasks)
        self.progress = Progress(tasks, latest, rules.window)
        self.arrivals = Arrivals(tasks)
        self.collector = Collector(limits.enough)
        self.channels = Channels(tasks, self.progress.done)
        self.history = History(tasks, self.channels)
        ahead = rules.compute_ahead * limits.scale_us
        self.ready = ReadyCompute(tasks, latest, self.progress, rules.window, ahead)
        self.waits: list[_Wait] = []
        self.left_us = sum(tasks.us)  # of compute
        self.tail = limits.tail or [0.0] * tasks.count
        # Every end of a task plus the least work that must follow it bounds this schedule. So does
        # the clock plus all compute that is left: one of them passes ``worth_us`` long before the
        # end of a bad candidate, which is then given up.
        self.least_us = 0.0  # the schedule cannot end sooner

    def run(self) -> Candidate:
        history = self.history
        while self.progress.left or self.arrivals or self.ready:
            if (
                self.least_us > self.limits.worth_us
                or history.now + self.left_us > self.limits.worth_us
            ):
                return Candidate([], {}, [], math.inf, self.memory.peak)
            self._update()
            chosen = self._pick()
            # Launches go before the chosen compute: they take no compute time, and the channel then
            # works under it. Without compute to run, look again, because a launch may have made
            # some ready.
            if self._fill_channels(chosen) and chosen < 0:
                continue
            if chosen >= 0:
                # Above the limit already, compute would only add to it. Launches whose inputs die
                # free memory and cost nothing on this stream.
                if self.memory.live > self.usable_bytes:
                    self._relieve_memory()
                self._compute(chosen)
            elif self.collector:
                self.channels.add(self.collector.release())
            elif self.arrivals:
                history.stand_still(*self.arrivals.next)
            elif (at := self.channels.next_free(history.now)) is not None:
                # No task is to arrive, yet launches queue behind a busy channel: by its end they
                # have gathered, and may share a bucket.
                history.now = at  # what queues there may then go together
            elif self.progress.left:
                self._force()
        steps, stalls, finish = history.steps, history.stalls, history.finish
        return Candidate(steps, stalls, finish, history.end(), self.memory.peak)

    def _update(self) -> None:
        """Take in what the clock and progress have made available."""
        progress = self.progress
        progress.advance()
        # Keep free what the program's own order will need from the frontier on. Otherwise a launch
        # ahead of time takes the last bytes and no order fits any more.
        self.usable_bytes = self.limits.cap_bytes - self.limits.rises[progress.frontier]
        for number in self.arrivals.due(self.history.now):
            self._arrive(number)
        if self.collector.enough:
            self.channels.add(self.collector.due(progress.at_us + self.launch_ahead))
        self.ready.update()

    def _arrive(self, number: int) -> None:
        """All that a task or a wait depends on has finished."""
        tasks = self.tasks
        if number >= tasks.count or tasks.launch[number] < 0:
            self.ready.add(number)
            return
        entry, key = (self.latest[number], number), self.merger.key[number]
        # Only launches that waited for something are collected. Loose ones may be started at any
        # time, so they never need to be held back for company.
        if tasks.preds[number] and key is not None and key in self.collector.enough:
            self.channels.add(self.collector.add(key, entry, tasks.payload[number]))
        else:
            self.channels.queue(entry)

    def _pick(self) -> int:
        """The task or wait to run next, or -1 to let time pass."""
        tasks, chosen = self.tasks, self.ready.choose(self._fits)
        if self.rules.patience and 0 <= chosen < tasks.count and self.arrivals:
            # A short task that is more urgent arrives soon: starting a long one now would delay it
            # by almost all of the long one. Idling is bounded by a share of that one's time, and by
            # what it could win.
            at, other = self.arrivals.next
            n = tasks.count
            urgency = self.waits[other - n].urgency if other >= n else self.latest[other]
            wait = at - self.history.now
            early = self.latest[chosen] - urgency
            if wait < self.rules.patience * tasks.us[chosen] and wait < early:
                return -1
        return chosen

    def _fits(self, t: int) -> bool:
        """Return whether ``t`` may run: what fits, or the program's next task if no launch in
        flight frees memory.
        """
        # The way out of a deadlock: with no launch in flight that would free memory, waiting cannot
        # help, and the program's next task is known to fit in the end.
        return self.tasks.transient[t] <= self.usable_bytes - self.memory.live or (
            t == self.progress.frontier and not self.memory.keeping
        )

    def _fill_channels(self, chosen: int) -> bool:
        """Launch on every channel that would fall idle before the compute stream is free again.

        On one that ``chosen`` holds, only what is more urgent goes first: compute would wait for
        it.
        """
        history, free = self.history, self.channels.free
        if chosen >= self.tasks.count:
            # The channels only have to be fed until the compute stream is free again; launches that
            # start later can still be chosen then, with more known.
            horizon = history.now + history.takes(self.waits[chosen - self.tasks.count].unpack_us)
        elif chosen >= 0:
            horizon = history.now + history.takes(self.tasks.us[chosen])
        else:
            horizon = self.arrivals.next[0] if self.arrivals else history.now
        # The cheap test for the common case, that every channel is busy beyond the horizon.
        soonest = min(free, default=math.inf)
        if soonest >= horizon and soonest > history.now:
            return False
        # A blocking collective starts when its channel is free: each launch put in front of it
        # there delays the compute stream by its whole link time.
        blocks = 0 <= chosen < self.tasks.count and self.tasks.blocks[chosen]
        held = self.channels.number[blocks] if blocks else -1
        launched = False
        for c in self.channels.waiting():
            while free[c] < horizon or free[c] <= history.now:
                queue = self._next_queue(c, chosen >= 0)
                if queue is None or (c == held and queue[0][0] >= self.latest[chosen]):
                    break
                self._launch(self._gather(queue, c))
                launched = True
                if history.now >= horizon and chosen < 0:
                    break
        return launched

    def _next_queue(self, c: int, computes: bool) -> list[Entry] | None:
        """The queue whose first launch goes next on channel c, if one may."""
        tasks, progress = self.tasks, self.progress
        bound, loose = self.channels.queues(c)
        free_bytes = self.usable_bytes - self.memory.live
        within_cap = self.limits.cap_bytes - self.memory.live
        takes_bound = bool(bound)
        if bound:
            t = bound[0][1]
            # What the program needs next has its room in what is kept free for the program.
            room = within_cap if tasks.needed_by[t] <= progress.frontier else free_bytes
            if tasks.transient[t] > room and (computes or self.arrivals):
                # Over the budget a launch may still go if it frees more than it makes. With nothing
                # else to do it goes anyway, since holding it back would not free memory.
                takes_bound = self.memory.would_add(t) < 0
        takes_loose = False
        if loose:
            ahead = self.launch_ahead
            # A channel is first in, first out: the loose launch would start only after the bound
            # one, so it must be counted urgent by that much earlier.
            if takes_bound:  # it would have to wait until the other has finished
                waits = max(0.0, self.channels.free[c] - self.history.now)
                ahead = max(ahead, waits + tasks.link_us[bound[0][1]])
            urgency, t = loose[0]
            room = within_cap if urgency <= progress.at_us else free_bytes  # needed next, too
            takes_loose = urgency <= progress.at_us + ahead and tasks.transient[t] <= room
        if takes_bound and takes_loose:
            return bound if bound[0] <= loose[0] else loose
        return bound if takes_bound else loose if takes_loose else None

    def _gather(self, queue: list[Entry], c: int) -> Bucket:
        """Return the first launch of a queue, with later ones that are worth merging."""
        first = heappop(queue)[1]
        bucket = self.merger.alone(first)
        key = self.merger.key[first]
        if not self.rules.merge or key is None:
            return bucket
        tasks, history = self.tasks, self.history
        loose = tasks.loose[first]
        begin = max(history.now, self.channels.free[c])
        # Latest starts are on a clock that this schedule may have fallen behind: by ``late`` all of
        # them have moved.
        needed = min((self.latest[s] for s in tasks.succs[first]), default=math.inf) + history.late
        added = tasks.alloc[first]
        enough = self.collector.enough.get(key, 0)
        # Launches of another key are set aside and put back. They must not end the search for
        # members, since gathers of several groups or dtypes alternate in a queue.
        other: list[Entry] = []
        while queue and len(bucket.members) + len(other) < MOST_MEMBERS:
            entry = heappop(queue)
            urgency, t = entry
            if self.progress.done[t]:
                continue
            if self.merger.key[t] != key:
                other.append(entry)
                continue
            added += tasks.alloc[t]
            payload = bucket.payload + tasks.payload[t]
            joined = self.merger.joined_us(bucket, t)
            # Bytes first: a bucket above the size at which links reach their bandwidth gains
            # nothing, and its first member waits for its last.
            fits = payload <= max(MOST_BYTES, enough)
            if loose and fits:
                # Memory for results and copies; and the first member must not come too late.
                free_bytes = self.usable_bytes - self.memory.live
                soon = urgency <= self.progress.at_us + self.launch_ahead or payload <= enough
                saved = bucket.link_us + tasks.link_us[t] - joined
                # A longer bucket delays the first member's reader. Accept that only if the channel
                # as a whole saves at least as much as this member adds to the bucket.
                in_time = begin + joined <= needed or saved >= joined - bucket.link_us
                fits = soon and in_time and added + 2 * payload <= free_bytes
            # Queues are in order of urgency: what comes after the first launch that does not fit is
            # needed later still.
            if not fits or self.merger.gain_us(bucket, t, self.rules.merge) <= 0:
                other.append(entry)
                break
            bucket = Bucket([*bucket.members, t], payload, joined)
        for entry in other:
            heappush(queue, entry)
        return bucket

    def _launch(self, bucket: Bucket) -> None:
        tasks, history, members = self.tasks, self.history, bucket.members
        merged = len(members) > 1
        launches = [tasks.launch[t] for t in members]
        # The peak is at the copy: originals and the packed buffer are alive together.
        if merged:  # copied while all that the members read is there
            history.compute(tasks.problem.pack_us(launches))
            self.memory.hold(bucket.payload, beside=sum(tasks.transient[t] for t in members))
        for t in members:
            history.compute(tasks.us[t])
            self._done(t)
        end = history.launch(members, bucket.link_us)
        self.least_us = max(self.least_us, end + max(self.tail[t] for t in members))
        # A wait of such a launch costs nothing and frees nothing, so its place does not matter;
        # ``expand`` puts it in front of the first reader.
        if not merged and not self.memory.keeps(members[0]):
            self.arrivals.complete(members[0], end)
            return
        # The urgency of a wait is that of the compute that reads it: tasks of no time only pass it
        # on.
        readers = [s for t in members for s in tasks.succs[t] if tasks.us[s]]
        urgency = min((self.latest[s] for s in readers), default=math.inf)
        unpack_us = tasks.problem.unpack_us(launches) if merged else 0.0
        self.arrivals.add(tasks.count + len(self.waits), end)
        self.waits.append(_Wait(urgency, bucket, unpack_us))

    def _compute(self, number: int) -> None:
        """Run a task of compute, or what a wait has to copy."""
        tasks, history = self.tasks, self.history
        if number >= tasks.count:
            self.ready.take_wait()
            self._finish(self.waits[number - tasks.count])
            return
        us = tasks.us[number]
        if us and history.now - self.latest[number] > history.late:
            # Latest starts have an arbitrary origin: ``late`` brings them onto this schedule's
            # clock.
            history.late = history.now - self.latest[number]
        history.compute(us, tasks.blocks[number])
        history.finish[number] = now = history.now
        if now + self.tail[number] > self.least_us:
            self.least_us = now + self.tail[number]
        history.steps.append(Step((number,)))
        self._done(number)
        self.arrivals.complete(number, now)

    def _done(self, t: int) -> None:
        self.memory.run(t)
        self.progress.done[t] = True
        self.progress.left -= 1
        self.left_us -= self.tasks.us[t]

    def _finish(self, wait: _Wait) -> None:
        members = wait.bucket.members
        self.history.compute(wait.unpack_us)
        self.history.steps.append(Step(tuple(members), waits=True))
        if len(members) > 1:
            # Only the packed inputs die here. Results stay: members' own values were counted when
            # they ran.
            self.memory.hold(-wait.bucket.payload)
        for t in members:
            self.memory.waited(t)
            self.arrivals.complete(t, self.history.now)

    def _relieve_memory(self) -> None:
        """Above the limit, launch what frees memory; a launch frees its input however long it
        queues.
        """
        self.channels.add(self.collector.release())
        for t in self.channels.bound():
            if self.memory.live <= self.usable_bytes:
                return
            # Alone and not in a bucket, whose packed copy would take more memory before it frees
            # any.
            if self.memory.would_add(t) < 0:
                self._launch(self.merger.alone(t))

    def _force(self) -> None:
        """Nothing may run: run what the program would need first, whatever the limits say."""
        # Going over the limit here keeps the schedule complete. The caller measures the peak and
        # prefers another candidate; if none fits, the leanest one is used.
        t = self.arrivals.needed_first(self.progress.done)
        if self.tasks.launch[t] >= 0:
            self._launch(self.merger.alone(t))
        else:
            self._compute(t)
