"""Launches that are worth merging: what the link saves against what copying costs."""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.schedule.model.problem import MERGED_OPS, UNPACKED_OPS
from inductor_passes.schedule.model.tasks import Tasks

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
            # A bucket's waits become one: a launch with several waits, or whose wait is tied, stays alone.
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
