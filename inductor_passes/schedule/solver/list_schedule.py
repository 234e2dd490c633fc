"""List scheduling with one compute stream, a channel per group, buckets, and a memory cap.

Time runs forwards. Whenever the compute stream is free, the ready task of least latest start runs; before
it starts, every channel that would fall idle under it is given its most urgent launches. Its parts: what
becomes ready when (``arrivals.py``), which compute may run (``ready.py``), which launches queue where
(``channels.py``), how far the program is (``progress.py``), and what has run when (``history.py``).
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import NamedTuple

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.arrivals import Arrivals
from inductor_passes.schedule.solver.bucket import MOST_BYTES, MOST_MEMBERS, Bucket, Merger
from inductor_passes.schedule.solver.channels import Channels
from inductor_passes.schedule.solver.collect import Collector, Entry
from inductor_passes.schedule.solver.draft import Draft, Limits
from inductor_passes.schedule.solver.expand import Step
from inductor_passes.schedule.solver.history import History
from inductor_passes.schedule.solver.live_memory import LiveMemory
from inductor_passes.schedule.solver.progress import Progress
from inductor_passes.schedule.solver.ready import ReadyCompute
from inductor_passes.schedule.solver.rules import Rules


def list_schedule(
    tasks: Tasks, merger: Merger, latest: list[float], limits: Limits, rules: Rules
) -> Draft:
    """Schedule by ``latest`` starts (us, any origin). The peak may exceed the cap: the caller looks."""
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
        self.room_for = limits.cap_bytes
        self.memory = LiveMemory(tasks)
        self.progress = Progress(tasks, latest)
        self.arrivals = Arrivals(tasks)
        self.collector = Collector(limits.enough)
        self.channels = Channels(tasks, self.progress.done)
        self.history = History(tasks, self.channels)
        ahead = rules.compute_ahead * limits.scale_us
        self.ready = ReadyCompute(tasks, latest, self.progress, rules.window, ahead)
        self.waits: list[_Wait] = []
        self.left_us = sum(tasks.us)  # of compute
        self.tail = limits.tail or [0.0] * tasks.count
        self.least_us = 0.0  # the schedule cannot end sooner

    def run(self) -> Draft:
        history = self.history
        while self.progress.left or self.arrivals or self.ready:
            if (
                self.least_us > self.limits.worth_us
                or history.now + self.left_us > self.limits.worth_us
            ):
                return Draft([], {}, [], math.inf, self.memory.peak)
            self._update()
            chosen = self._pick()
            if self._fill_channels(chosen) and chosen < 0:
                continue
            if chosen >= 0:
                if self.memory.live > self.room_for:
                    self._relieve_memory()
                self._compute(chosen)
            elif self.collector:
                self.channels.add(self.collector.release())
            elif self.arrivals:
                history.stand_still(*self.arrivals.next)
            elif (at := self.channels.next_free(history.now)) is not None:
                history.now = at  # what queues there may then go together
            elif self.progress.left:
                self._force()
        steps, stalls, finish = history.steps, history.stalls, history.finish
        return Draft(steps, stalls, finish, history.end(), self.memory.peak)

    def _update(self) -> None:
        """Take in what the clock and progress have made available."""
        progress = self.progress
        progress.advance()
        self.room_for = self.limits.cap_bytes - self.limits.rises[progress.frontier]
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
        if tasks.preds[number] and key is not None and key in self.collector.enough:
            self.channels.add(self.collector.add(key, entry, tasks.payload[number]))
        else:
            self.channels.queue(entry)

    def _pick(self) -> int:
        """The task or wait to run next, or -1 to let time pass."""
        tasks, chosen = self.tasks, self.ready.choose(self._fits)
        if self.rules.patience and 0 <= chosen < tasks.count and self.arrivals:
            at, other = self.arrivals.next
            n = tasks.count
            urgency = self.waits[other - n].urgency if other >= n else self.latest[other]
            wait = at - self.history.now
            early = self.latest[chosen] - urgency
            if wait < self.rules.patience * tasks.us[chosen] and wait < early:
                return -1
        return chosen

    def _fits(self, t: int) -> bool:
        """Return whether ``t`` may run: what fits, or the program's next task if no launch in flight frees memory."""
        return self.tasks.transient[t] <= self.room_for - self.memory.live or (
            t == self.progress.frontier and not self.memory.keeping
        )

    def _fill_channels(self, chosen: int) -> bool:
        """Launch on every channel that would fall idle before the compute stream is free again.

        On one that ``chosen`` holds, only what is more urgent goes first: compute would wait for it.
        """
        history, free = self.history, self.channels.free
        if chosen >= self.tasks.count:
            horizon = history.now + history.takes(self.waits[chosen - self.tasks.count].unpack_us)
        elif chosen >= 0:
            horizon = history.now + history.takes(self.tasks.us[chosen])
        else:
            horizon = self.arrivals.next[0] if self.arrivals else history.now
        soonest = min(free, default=math.inf)
        if soonest >= horizon and soonest > history.now:
            return False
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
        room = self.room_for - self.memory.live
        takes_bound = bool(bound)
        if bound:
            t = bound[0][1]
            if tasks.transient[t] > room and (computes or self.arrivals):
                takes_bound = self.memory.would_add(t) < 0
        takes_loose = False
        if loose:
            ahead = self.launch_ahead
            if takes_bound:  # it would have to wait until the other has finished
                waits = max(0.0, self.channels.free[c] - self.history.now)
                ahead = max(ahead, waits + tasks.link_us[bound[0][1]])
            urgency, t = loose[0]
            if urgency <= progress.at_us:  # needed next: the program has room for it
                room = self.limits.cap_bytes - self.memory.live
            takes_loose = urgency <= progress.at_us + ahead and tasks.transient[t] <= room
        if takes_bound and takes_loose:
            return bound if bound[0] <= loose[0] else loose
        return bound if takes_bound else loose if takes_loose else None

    def _gather(self, queue: list[Entry], c: int) -> Bucket:
        """The first launch of a queue, with those behind it that are worth merging."""
        first = heappop(queue)[1]
        bucket = self.merger.alone(first)
        key = self.merger.key[first]
        if not self.rules.merge or key is None:
            return bucket
        tasks, history = self.tasks, self.history
        loose = not tasks.preds[first]
        begin = max(history.now, self.channels.free[c])
        needed = min((self.latest[s] for s in tasks.succs[first]), default=math.inf) + history.late
        added = tasks.alloc[first]
        enough = self.collector.enough.get(key, 0)
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
            fits = payload <= max(MOST_BYTES, enough)
            if loose and fits:
                # Memory for results and copies; and the first member must not come too late.
                room = self.room_for - self.memory.live
                soon = urgency <= self.progress.at_us + self.launch_ahead or payload <= enough
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
        tasks, history, members = self.tasks, self.history, bucket.members
        merged = len(members) > 1
        launches = [tasks.launch[t] for t in members]
        if merged:  # copied while all that the members read is there
            history.compute(tasks.problem.pack_us(launches))
            self.memory.hold(bucket.payload, beside=sum(tasks.transient[t] for t in members))
        for t in members:
            history.compute(tasks.us[t])
            self._done(t)
        end = history.launch(members, bucket.link_us)
        self.least_us = max(self.least_us, end + max(self.tail[t] for t in members))
        if not merged and not self.memory.keeps(members[0]):
            self.arrivals.complete(members[0], end)
            return
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
            self.memory.hold(-wait.bucket.payload)
        for t in members:
            self.memory.waited(t)
            self.arrivals.complete(t, self.history.now)

    def _relieve_memory(self) -> None:
        """Above the limit, launch what frees memory; a launch frees its input however long it queues."""
        self.channels.add(self.collector.release())
        for t in self.channels.bound():
            if self.memory.live <= self.room_for:
                return
            if self.memory.would_add(t) < 0:
                self._launch(self.merger.alone(t))

    def _force(self) -> None:
        """Nothing may run: run what the program would need first, whatever the limits say."""
        t = min(self.arrivals.arrived(self.progress.done), key=self.tasks.needed_by.__getitem__)
        if self.tasks.launch[t] >= 0:
            self._launch(self.merger.alone(t))
        else:
            self._compute(t)
