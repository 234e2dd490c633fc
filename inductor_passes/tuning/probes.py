"""Launches of a second payload: one payload of a group and kind does not tell what a launch costs from what its bytes do.

Every rank lists what its graphs have launched with one payload alone. What all ranks of a group have listed alike is in the plan, the
same for all, in one order, of which each rank launches what its groups are in: no rank launches what another of the group does not.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from inductor_passes.machine.measure.links import launch_of
from inductor_passes.machine.times.times import LaunchTime
from inductor_passes.records import CollectiveRecord, GraphRecord
from inductor_passes.torch_compat.c10d import own_name, real_group_ranks
from inductor_passes.tuning.merge import offsets

# A probe has a 16th of the payload that was measured, or 16 times as many bytes where that is short.
FACTOR, SHORT_BYTES = 16, 64 * 1024
MOST, REPEATS = 16, 6
_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
# Seconds at which a launch began and its result was there, in turn.
Spans = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, order=True)
class Probe:
    """A launch of ``payload_bytes`` of a rank's input over a group, by the name and global ranks that all its ranks know it by."""

    members: tuple[int, ...]
    group: str
    kind: str
    dtype: str
    nodes: int
    payload_bytes: int

    def to_json(self) -> list[object]:
        """Plain JSON types."""
        return [
            list(self.members),
            self.group,
            self.kind,
            self.dtype,
            self.nodes,
            self.payload_bytes,
        ]

    @classmethod
    def from_json(cls, data: Sequence[object]) -> Probe:
        """Inverse of ``to_json``."""
        members, *rest = data
        return cls(tuple(members), *rest)  # type: ignore[arg-type]


def wanted(records: Sequence[GraphRecord]) -> list[Probe]:
    """List what these graphs launch with payloads of one size alone, with another one."""
    found: dict[tuple[tuple[int, ...], str, str, int], dict[int, str]] = defaultdict(dict)
    for record in records:
        hosts = [node.hosts for node in record.nodes if node.event == "launch"]
        for collective, on in zip(record.collectives, hosts, strict=True):
            members = real_group_ranks(collective.group_name)
            if _can_be_probed(collective) and members is not None and len(members) > 1:
                key = members, own_name(collective.group_name), collective.kind, max(1, on)
                found[key][collective.payload_bytes] = collective.dtype
    probes = []
    for (members, group, kind, nodes), payloads in found.items():
        least, most = min(payloads), max(payloads)
        if least <= 0 or most >= 2 * least:
            continue
        dtype = payloads[most]
        one = len(members) * getattr(torch, dtype).itemsize  # which all kinds can share out
        payload = most // FACTOR if most > SHORT_BYTES else most * FACTOR
        probes.append(Probe(members, group, kind, dtype, nodes, max(1, payload // one) * one))
    return sorted(probes)


def _can_be_probed(collective: CollectiveRecord) -> bool:
    """Return whether a launch of zeros, summed if anything, stands for it."""
    dtype = getattr(torch, collective.dtype, None)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return collective.kind in _KINDS and is_float


def plan(of_ranks: Mapping[int, Sequence[Probe]]) -> list[Probe]:
    """List what all ranks of its group want, in the one order in which ranks launch."""
    every = {probe for probes in of_ranks.values() for probe in probes}
    return sorted(
        probe for probe in every if all(probe in of_ranks.get(rank, ()) for rank in probe.members)
    )[:MOST]


def run(planned: Sequence[Probe], rank: int) -> dict[int, list[tuple[float, float]]]:
    """Launch a plan's probes that this rank is in, on the CPU, each waited for at once; spans of each by its number in the plan."""
    found = {}
    for number, probe in enumerate(planned):
        if rank not in probe.members:
            continue
        dtype = getattr(torch, probe.dtype)
        mine = torch.zeros(probe.payload_bytes // dtype.itemsize, dtype=dtype)
        start = launch_of(probe.kind, mine, probe.group, len(probe.members))
        spans = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            torch.ops._c10d_functional.wait_tensor(start())
            spans.append((begin, time.perf_counter()))
        found[number] = spans[1:]
    return found


def launch_times(
    planned: Sequence[Probe], of_ranks: Mapping[int, Mapping[int, Spans]]
) -> list[LaunchTime]:
    """Times of a plan's probes: from the last rank's coming to the slowest one's result, of groups alike the slowest.

    ``predicted_us`` is 0: nobody has asked for a prediction.
    """
    found: dict[tuple[str, int, int, int], float] = {}
    for number, probe in enumerate(planned):
        meetings = {
            rank: {(at, 0): (b, e) for at, (b, e) in enumerate(of_ranks[rank][number])}
            for rank in probe.members
        }
        late = offsets(meetings)
        us = 1e6 * statistics.median(
            max(meetings[r][at][1] + late[r] for r in meetings)
            - max(meetings[r][at][0] + late[r] for r in meetings)
            for at in meetings[probe.members[0]]
        )
        key = probe.kind, len(probe.members), probe.nodes, probe.payload_bytes
        found[key] = max(us, found.get(key, 0.0))
    return [LaunchTime(*key, us, 0.0) for key, us in found.items()]
