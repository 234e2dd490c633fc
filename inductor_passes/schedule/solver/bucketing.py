"""Merge collectives where the link saves more than copying costs, and let them wait for one
another.

Where the floor of a launch is most of its time, as in rings over thousands of ranks, a channel that
takes every launch as it comes is busy for longer than the step computes. Then launches whose
results are not needed yet are held back until enough of them can go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from inductor_passes.schedule.solver.lower_bound import least_link_us
from inductor_passes.schedule.solver.problem import MERGED_OPS, UNPACKED_OPS
from inductor_passes.schedule.solver.tasks import Tasks

MergeKey = tuple[str, str, str, str]  # see ``Node.merge_key``; group and operation come first
MOST_MEMBERS = 64
MOST_BYTES = 64 << 20  # of payload: beyond, links gain nothing and the first member waits long


@dataclass(slots=True)
class Bucket:
    """Launch tasks that shall run as one: ``payload`` bytes, ``link_us`` on the channel."""

    members: list[int]
    payload: int
    link_us: float


class Merger:
    """Prices of buckets for one problem."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        problem = tasks.problem
        self._copy_us_per_byte: list[float] = []
        self.key: list[MergeKey | None] = []
        for launch, behind in zip(tasks.launch, tasks.behind, strict=True):
            node = problem.nodes[launch]
            waits = sum(problem.nodes[i].launch is not None for i in behind)
            # A bucket's waits become one: a launch with several waits, or whose wait is tied, stays
            # alone.
            mergeable = launch >= 0 and node.op in MERGED_OPS and waits == 1
            self.key.append(node.merge_key if mergeable else None)
            copied = 1
            if mergeable and node.op in UNPACKED_OPS:
                copied += problem.group_size[node.group] if node.op == "all_gather" else 1
            self._copy_us_per_byte.append(2 * copied / problem.copy_bytes_per_us)

    def alone(self, t: int) -> Bucket:
        """A bucket of one."""
        return Bucket([t], self._tasks.payload[t], self._tasks.link_us[t])

    def joined_us(self, bucket: Bucket, t: int) -> float:
        """Link time of the bucket with one more member."""
        node = self._tasks.problem.nodes[self._tasks.launch[t]]
        payload = bucket.payload + self._tasks.payload[t]
        return self._tasks.problem.link_us(node.group, node.op, payload)

    def gain_us(self, bucket: Bucket, t: int, weight: float) -> float:
        """``weight`` times what the link saves, less what copying costs on the compute stream."""
        saved = bucket.link_us + self._tasks.link_us[t] - self.joined_us(bucket, t)
        copied = self._tasks.payload[t] + (bucket.payload if len(bucket.members) == 1 else 0)
        return weight * saved - copied * self._copy_us_per_byte[t]


Enough = Mapping[MergeKey, int]
Entry = tuple[float, int]  # latest start (or another time, us), task
LEAST_SHARE = 1 / 16  # of a channel's launches are left when as many as may be are merged
WORTH = 0.25  # floors below this part of the busy time are not worth holding launches for


def enough_for(tasks: Tasks, merger: Merger, busy_us: float) -> Enough:
    """Per merge key, the payload (bytes) of buckets by which its channel is busy for about
    ``busy_us``.

    Keys of channels that are busy for less, or with more than floors, are left out.
    """
    on_channel: dict[str, list[int]] = {}
    for t, launch in enumerate(tasks.launch):
        if launch >= 0:
            on_channel.setdefault(tasks.group[t], []).append(t)
    enough: dict[MergeKey, int] = {}
    for listed in on_channel.values():
        by_key: dict[MergeKey, list[int]] = {}
        latency_us = 0.0
        for t in listed:
            if key := merger.key[t]:
                by_key.setdefault(key, []).append(t)
                latency_us += tasks.link_us[t] - least_link_us(tasks.problem, tasks.launch[t])
        saved = sum(tasks.link_us[t] for t in listed) - busy_us
        if saved <= 0 or latency_us < WORTH * busy_us:
            continue
        share = max(LEAST_SHARE, 1 - saved / latency_us)
        for key, members in by_key.items():
            buckets = max(1, int(share * len(members)))
            if buckets < len(members):
                enough[key] = sum(tasks.payload[t] for t in members) // buckets
    return enough


def link_us_in_buckets(tasks: Tasks, merger: Merger, enough: Enough) -> list[float]:
    """Per task, its launch's part (us) of the time that a bucket which is large enough takes."""
    whole = {key: tasks.problem.link_us(key[0], key[1], enough[key]) for key in enough}
    found = list(tasks.link_us)
    for t, key in enumerate(merger.key):
        if key in whole:
            found[t] = min(found[t], whole[key] * tasks.payload[t] / enough[key])
    return found


class Collector:
    """The launches that are held back, by merge key. Every call gives those that wait no longer."""

    def __init__(self, enough: Enough) -> None:
        self.enough = enough
        self._held: dict[MergeKey, list[Entry]] = {key: [] for key in enough}
        self._payload = dict.fromkeys(enough, 0)

    def __bool__(self) -> bool:
        return any(self._held.values())

    def add(self, key: MergeKey, entry: Entry, payload: int) -> list[Entry]:
        """Hold one more launch of ``payload`` bytes, unless there are enough now."""
        heappush(self._held[key], entry)
        self._payload[key] += payload
        return self.release([key]) if self._payload[key] >= self.enough[key] else []

    def due(self, until_us: float) -> list[Entry]:
        """With a latest start up to ``until_us``, and those that they can go with."""
        return self.release(
            key for key, held in self._held.items() if held and held[0][0] <= until_us
        )

    def release(self, keys: Iterable[MergeKey] | None = None) -> list[Entry]:
        """Of some keys, or of all."""
        found: list[Entry] = []
        for key in list(self._held if keys is None else keys):
            while self._held[key]:
                found.append(heappop(self._held[key]))
            self._payload[key] = 0
        return found
