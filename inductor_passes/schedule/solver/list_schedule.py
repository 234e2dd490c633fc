"""List scheduling with one compute stream, a channel per group, buckets, and a memory cap.

Time runs forwards. Whenever the compute stream is free, the ready task of least latest start runs; before
it starts, every channel that would fall idle under it is given its most urgent launches.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.bucket import MOST_BYTES, MOST_MEMBERS, Bucket, Merger
from inductor_passes.schedule.solver.collect import Collector, Entry
from inductor_passes.schedule.solver.draft import Draft, Limits
from inductor_passes.schedule.solver.expand import Step
from inductor_passes.schedule.solver.live_memory import LiveMemory
from inductor_passes.schedule.solver.rules import Rules
from inductor_passes.simulate.execution import stretched

INF = math.inf
Queue = list[tuple[float, int]]  # a heap of (urgency or time, task)
TRIED = 16  # tasks looked at for one that fits when memory is short


def list_schedule(
    tasks: Tasks, merger: Merger, latest: list[float], limits: Limits, rules: Rules
) -> Draft:
    """Schedule by ``latest`` starts (us, any origin). The peak may exceed the cap: the caller looks."""
    return _Run(tasks, merger, latest, limits, rules).run()


class _Run:
    """One schedule in the making.

    Numbers from ``tasks.count`` on stand for waits: of buckets, and of launches that keep what they read.
    Entries of the queues that have been run from elsewhere stay behind and are skipped.
    """

    def __init__(
        self, tasks: Tasks, merger: Merger, latest: list[float], limits: Limits, rules: Rules
    ) -> None:
        self.tasks, self.merger, self.latest = tasks, merger, latest
        self.limits, self.rules = limits, rules
        self.collector = Collector(limits.enough)
        self.launch_ahead = rules.launch_ahead * limits.scale_us
        self.compute_ahead = rules.compute_ahead * limits.scale_us
        self.memory = LiveMemory(tasks)
        self.limit = limits.cap_bytes
        self.stretch = tasks.problem.compute_stretch
        self.clock = self.late = 0.0
        self.progress = min(latest, default=0.0)
        self.frontier = 0
        self.front = 0
        bound = [t for t in range(tasks.count) if tasks.launch[t] < 0 and not tasks.floating[t]]
        self.by_urgency = sorted(bound, key=latest.__getitem__)
        self.left = tasks.count
        self.keeping = 0  # launches in flight that free memory when they are done
        self.steps: list[Step] = []
        self.stalls: dict[int, float] = {}
        self.finish = [0.0] * tasks.count
        self.done = [False] * tasks.count
        self.missing = [len(before) for before in tasks.preds]
        self.ready_at = [0.0] * tasks.count
        groups = sorted({group for group in (*tasks.group, *tasks.blocks) if group})
        self.channel = {group: c for c, group in enumerate(groups)}
        self.free = [0.0] * len(groups)
        # Launches per channel: those that wait for something, and those that could go at any time.
        self.bound: list[Queue] = [[] for _ in groups]
        self.loose: list[Queue] = [[] for _ in groups]
        self.arriving: Queue = []  # by the time at which they will be ready
        self.ready: Queue = []  # by urgency, as the next three
        self.by_age: list[int] = []  # the same, by task number
        self.too_early: Queue = []  # waits for nothing, and is not needed yet
        self.by_need: Queue = []  # everything available, by the compute that needs it first
        self.too_far: list[int] = []  # beyond the window
        self.waits: list[tuple[float, Bucket, float]] = []  # urgency, bucket, unpacking

    def run(self) -> Draft:
        for t in range(self.tasks.count):
            if not self.missing[t]:
                self._arrive(t)
        while self.left or self.arriving or self.ready:
            self._update()
            chosen = self._pick()
            if self._fill_channels(chosen) and chosen < 0:
                continue
            if chosen >= 0:
                self._relieve_memory()
                self._run_compute(chosen)
            elif self.collector:
                self._queue(self.collector.release())
            elif self.arriving:
                self._stand_still()
            elif waiting := [at for c, at in enumerate(self.free) if self._queued(c, at)]:
                self.clock = min(waiting)  # what queues there may then go together
            elif self.left:
                self._force()
        makespan = max([self.clock, *self.free])
        return Draft(self.steps, self.stalls, self.finish, makespan, self.memory.peak)

    def _stand_still(self) -> None:
        """Let time pass to the next arrival, and note which launch the compute stream waits for."""
        at, t = self.arriving[0]
        if at > self.clock and t < self.tasks.count:
            late = max(self.tasks.preds[t], key=lambda p: self.finish[p])
            self.stalls[late] = self.stalls.get(late, 0.0) + at - self.clock
        self.clock = max(self.clock, at)

    def _takes(self, us: float) -> float:
        """Time of ``us`` of compute from now on, beside what is on its way."""
        if self.stretch <= 1.0:
            return us
        return stretched(us, max(self.free, default=0.0) - self.clock, self.stretch)

    def _queued(self, c: int, at: float) -> bool:
        """Return whether channel c, free from ``at``, is busy while launches queue for it."""
        return at > self.clock and any(
            not self.done[t] for queue in (self.bound[c], self.loose[c]) for _, t in queue
        )

    def _update(self) -> None:
        """Take in what the clock, the frontier and progress have made available."""
        tasks, done = self.tasks, self.done
        while self.arriving and self.arriving[0][0] <= self.clock:
            self._arrive(heappop(self.arriving)[1])
        while self.frontier < tasks.count and (
            done[self.frontier] or tasks.launch[self.frontier] >= 0
        ):
            self.frontier += 1
        self.limit = self.limits.cap_bytes - self.limits.rises[self.frontier]
        while self.too_far and self.too_far[0] <= self.frontier + self.rules.window:
            self._arrive(heappop(self.too_far))
        by_urgency = self.by_urgency
        while self.front < len(by_urgency) and done[by_urgency[self.front]]:
            self.front += 1
        if self.front < len(by_urgency):
            self.progress = self.latest[by_urgency[self.front]]
        self._queue(self.collector.due(self.progress + self.launch_ahead))
        while self.too_early and self.too_early[0][0] <= self.progress + self.compute_ahead:
            self._make_ready(heappop(self.too_early)[1])

    def _arrive(self, t: int) -> None:
        """All that task t depends on has finished."""
        if t < self.tasks.count:
            heappush(self.by_need, (self.tasks.needed_by[t], t))
        if t >= self.tasks.count:
            heappush(self.ready, (-INF, t))
        elif self.tasks.launch[t] >= 0:
            entry, key = (self.latest[t], t), self.merger.key[t]
            if not self.tasks.preds[t]:
                heappush(self.loose[self.channel[self.tasks.group[t]]], entry)
            elif key is not None and key in self.collector.enough:
                self._queue(self.collector.add(key, entry, self.tasks.payload[t]))
            else:
                self._queue([entry])
        elif t > self.frontier + self.rules.window:
            heappush(self.too_far, t)
        elif self.tasks.floating[t] and self.latest[t] > self.progress + self.compute_ahead:
            heappush(self.too_early, (self.latest[t], t))
        else:
            self._make_ready(t)

    def _queue(self, entries: list[Entry]) -> None:
        """Launches that waited for something may go."""
        for entry in entries:
            heappush(self.bound[self.channel[self.tasks.group[entry[1]]]], entry)

    def _make_ready(self, t: int) -> None:
        heappush(self.ready, (self.latest[t] if self.tasks.us[t] else -INF, t))
        heappush(self.by_age, t)

    def _complete(self, t: int, at: float) -> None:
        for s in self.tasks.succs[t]:
            self.missing[s] -= 1
            self.ready_at[s] = max(self.ready_at[s], at)
            if self.missing[s]:
                continue
            if self.ready_at[s] <= self.clock:
                self._arrive(s)
            else:
                heappush(self.arriving, (self.ready_at[s], s))

    def _pick(self) -> int:
        """The compute to run next, or -1 to let time pass.

        Urgent tasks by latest start; when none is, the oldest of the program, which frees memory soonest.
        """
        tasks = self.tasks
        while self.ready and self.ready[0][1] < tasks.count and self.done[self.ready[0][1]]:
            heappop(self.ready)
        if not self.ready:
            return -1
        key, chosen = self.ready[0]
        urgent = key <= self.progress + self.compute_ahead
        if chosen < tasks.count and not (urgent and self._fits(chosen)):
            chosen = self._oldest_that_fits()
            if chosen < 0:
                return -1
            key = self.latest[chosen]
        if self.rules.patience and chosen < tasks.count and self.arriving:
            at, other = self.arriving[0]
            n = tasks.count
            urgency = self.waits[other - n][0] if other >= n else self.latest[other]
            wait = at - self.clock
            if wait < self.rules.patience * tasks.us[chosen] and wait < key - urgency:
                return -1
        if chosen >= tasks.count:
            heappop(self.ready)
        return chosen

    def _fits(self, t: int) -> bool:
        """Return whether ``t`` may run: what fits, or the program's next task if no launch in flight frees memory."""
        room = self.limit - self.memory.live
        return self.tasks.transient[t] <= room or (t == self.frontier and not self.keeping)

    def _oldest_that_fits(self) -> int:
        """Short of memory, go by the program's order: it is known to fit in the end."""
        chosen = -1
        passed: list[int] = []
        while self.by_age and chosen < 0 and len(passed) < TRIED:
            t = heappop(self.by_age)
            if self.done[t]:
                continue
            passed.append(t)
            if self._fits(t):
                chosen = t
        for t in passed:
            heappush(self.by_age, t)
        return chosen

    def _fill_channels(self, chosen: int) -> bool:
        """Launch on every channel that would fall idle before the compute stream is free again."""
        if chosen >= self.tasks.count:
            horizon = self.clock + self._takes(self.waits[chosen - self.tasks.count][2])
        elif chosen >= 0:
            horizon = self.clock + self._takes(self.tasks.us[chosen])
        else:
            horizon = self.arriving[0][0] if self.arriving else self.clock
        launched = False
        for c in range(len(self.free)):
            while self.free[c] < horizon or self.free[c] <= self.clock:
                queue = self._next_queue(c, chosen >= 0)
                if queue is None:
                    break
                self._launch(self._gather(queue, c))
                launched = True
                if self.clock >= horizon and chosen < 0:
                    break
        return launched

    def _next_queue(self, c: int, computes: bool) -> Queue | None:
        """The queue whose first launch goes next on channel c, if one may."""
        bound, loose, tasks = self.bound[c], self.loose[c], self.tasks
        for queue in (bound, loose):
            while queue and self.done[queue[0][1]]:
                heappop(queue)
        room = self.limit - self.memory.live
        takes_bound = bool(bound)
        if bound:
            t = bound[0][1]
            if tasks.transient[t] > room and (computes or self.arriving):
                takes_bound = self.memory.would_add(t) < 0
        takes_loose = False
        if loose:
            ahead = self.launch_ahead
            if takes_bound:  # it would have to wait until the other has finished
                waits = max(0.0, self.free[c] - self.clock)
                ahead = max(ahead, waits + tasks.link_us[bound[0][1]])
            urgency, t = loose[0]
            if urgency <= self.progress:  # needed next: the program has room for it
                room = self.limits.cap_bytes - self.memory.live
            takes_loose = urgency <= self.progress + ahead and tasks.transient[t] <= room
        if takes_bound and takes_loose:
            return bound if bound[0] <= loose[0] else loose
        return bound if takes_bound else loose if takes_loose else None

    def _gather(self, queue: Queue, c: int) -> Bucket:
        """The first launch of a queue, with those behind it that are worth merging."""
        first = heappop(queue)[1]
        bucket = self.merger.alone(first)
        key = self.merger.key[first]
        if not self.rules.merge or key is None:
            return bucket
        tasks = self.tasks
        loose = not tasks.preds[first]
        begin = max(self.clock, self.free[c])
        needed = min((self.latest[s] for s in tasks.succs[first]), default=INF) + self.late
        added = tasks.alloc[first]
        enough = self.collector.enough.get(key, 0)
        other: Queue = []
        while queue and len(bucket.members) + len(other) < MOST_MEMBERS:
            entry = heappop(queue)
            urgency, t = entry
            if self.done[t]:
                continue
            if self.merger.key[t] != key:
                other.append(entry)
                continue
            added += tasks.alloc[t]
            payload = bucket.payload + tasks.payload[t]
            joined = self.merger.joined_us(bucket, t)
            fits = payload <= max(MOST_BYTES, enough)
            if loose and fits:
                # Memory for results and copies; and the first member must not come too late.
                room = self.limit - self.memory.live
                soon = urgency <= self.progress + self.launch_ahead or payload <= enough
                saved = bucket.link_us + tasks.link_us[t] - joined
                in_time = begin + joined <= needed or saved >= joined - bucket.link_us
                fits = soon and in_time and added + 2 * payload <= room
            if not fits or self.merger.gain_us(bucket, t, self.rules.merge) <= 0:
                other.append(entry)
                break
            bucket = Bucket([*bucket.members, t], payload, joined)
        for entry in other:
            heappush(queue, entry)
        return bucket

    def _launch(self, bucket: Bucket) -> None:
        tasks = self.tasks
        merged = len(bucket.members) > 1
        launches = [tasks.launch[t] for t in bucket.members]
        if merged:  # copied while all that the members read is there
            self.clock += self._takes(tasks.problem.pack_us(launches))
            self.memory.hold(bucket.payload, beside=sum(tasks.transient[t] for t in bucket.members))
        for t in bucket.members:
            self.clock += self._takes(tasks.us[t])
            self.memory.run(t)
            self.done[t] = True
        self.left -= len(bucket.members)
        self.steps.append(Step(tuple(bucket.members)))
        c = self.channel[tasks.group[bucket.members[0]]]
        self.free[c] = max(self.clock, self.free[c]) + bucket.link_us
        for t in bucket.members:
            self.finish[t] = self.free[c]
        keeps = self._keeps(bucket)
        self.keeping += keeps
        if merged or keeps:
            readers = [s for t in bucket.members for s in tasks.succs[t] if tasks.us[s]]
            urgency = min((self.latest[s] for s in readers), default=INF)
            unpack_us = tasks.problem.unpack_us(launches) if merged else 0.0
            self.waits.append((urgency, bucket, unpack_us))
            number = tasks.count + len(self.waits) - 1
            heappush(self.arriving, (self.free[c], number))
        else:
            self._complete(bucket.members[0], self.free[c])

    def _keeps(self, bucket: Bucket) -> bool:
        """Return whether memory is free only after the wait, which so is a step of its own."""
        tasks = self.tasks
        return any(tasks.kept[t] or tasks.kept_inside[t] for t in bucket.members)

    def _run_compute(self, t: int) -> None:
        tasks = self.tasks
        if t >= tasks.count:
            _, bucket, unpack_us = self.waits[t - tasks.count]
            self.clock += self._takes(unpack_us)
            self.steps.append(Step(tuple(bucket.members), waits=True))
            self.keeping -= self._keeps(bucket)
            if len(bucket.members) > 1:
                self.memory.hold(-bucket.payload)
            for member in bucket.members:
                self.memory.waited(member)
                self._complete(member, self.clock)
            return
        if tasks.us[t]:
            self.late = max(self.late, self.clock - self.latest[t])
        if tasks.blocks[t]:
            c = self.channel[tasks.blocks[t]]
            self.clock = self.free[c] = max(self.clock, self.free[c]) + tasks.us[t]
        else:
            self.clock += self._takes(tasks.us[t])
        self.finish[t] = self.clock
        self.memory.run(t)
        self.done[t] = True
        self.left -= 1
        self.steps.append(Step((t,)))
        self._complete(t, self.clock)

    def _relieve_memory(self) -> None:
        """Above the limit, launch what frees memory; a launch frees its input however long it queues."""
        if self.memory.live <= self.limit:
            return
        self._queue(self.collector.release())
        for bound in self.bound:
            for _, t in sorted(bound):
                if self.memory.live <= self.limit:
                    return
                if not self.done[t] and self.memory.would_add(t) < 0:
                    self._launch(self.merger.alone(t))

    def _force(self) -> None:
        """Nothing may run: run what the program would need first, whatever the limits say."""
        while self.done[self.by_need[0][1]]:
            heappop(self.by_need)
        t = self.by_need[0][1]
        if self.tasks.launch[t] >= 0:
            self._launch(self.merger.alone(t))
        else:
            self._run_compute(t)
