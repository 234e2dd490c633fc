"""Clocks of all ranks -> one table. Compute counts as on the slowest rank, a launch from the last rank's coming on.

In a step whose launches are waited for at once, each is a meeting of its group: what lies between two meetings takes as
long as on the rank that was slowest then, and the launch itself from when the last rank came to it until the slowest
had its result. So the sum is the step, and a rank that waits for others is not taken for a slow link. Ranks' clocks
start where they like: no rank has a result before the last one came, which bounds how far two clocks are apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime
from inductor_passes.records import GraphRecord
from inductor_passes.tuning.layout import CodeLayout

# Seconds at the beginning of a call, before and after each event, and at its end.
Marks = Sequence[float]


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Calls of one graph on one rank: ``alone`` with each launch waited for at once, ``scheduled`` as it is.

    ``members``: global ranks of the group of each launch, in order. ``shares``: microseconds of nodes by name in a call, where a
    profile tells them apart.
    """

    alone: tuple[Marks, ...]
    scheduled: tuple[Marks, ...]
    members: tuple[tuple[int, ...], ...]
    shares: Mapping[str, float] = field(default_factory=dict)


def segment_us(layout: CodeLayout, marks: Marks, number: int) -> tuple[float, list[float]]:
    """Microseconds of a segment of one call, and of its clocked kernels."""
    before = 0 if number == 0 else 2 + 2 * layout.syncs[number - 1]
    after = -1 if number == len(layout.syncs) else 1 + 2 * layout.syncs[number]
    kernels = [_event_us(marks, at) for at in layout.segments[number].clocked]
    return 1e6 * (marks[after] - marks[before]), kernels


def _event_us(marks: Marks, at: int) -> float:
    return 1e6 * (marks[2 + 2 * at] - marks[1 + 2 * at])


def graph_times(
    record: GraphRecord,
    layout: CodeLayout,
    ranks: Mapping[int, RankCalls],
    launched: Sequence[LaunchTime],
) -> GraphTimes:
    """Times of one graph from the calls of all ranks that run it: of nodes that it had before the passes, and launches.

    ``launched``: the graph's launches in order; of each, all but its time counts.
    """
    calls = min(len(each.alone) for each in ranks.values())
    fixed = _host_us(layout, ranks)
    nodes: dict[str, NodeTime] = {}
    known = {node.name: node for node in record.nodes}
    told: dict[str, float] = {}
    for each in ranks.values():
        for name, us in each.shares.items():
            told[name] = max(us, told.get(name, 0.0))
    carried = 0.0
    for number in range(len(layout.segments)):
        segment = layout.segments[number]
        slowest = [
            max(
                (segment_us(layout, each.alone[call], number) for each in ranks.values()),
                key=_total,
            )
            for call in range(calls)
        ]
        total = statistics.median(us for us, _ in slowest) + carried
        if number:
            total += fixed[number - 1]
        kernels = [statistics.median(k) for k in zip(*(k for _, k in slowest), strict=True)]
        shared = segment.shared(total, kernels, told)
        carried = 0.0 if shared else total
        for name, us in shared.items():
            node = known[name]
            nodes[name] = NodeTime(node.operator, us, node.predicted_us, node.dtype, node.product)
    if carried and nodes:  # nothing computes behind the last launch or wait
        last = next(reversed(nodes))
        nodes[last] = _longer(nodes[last], carried)
    times = _launch_us(layout, ranks, calls)
    launches = {
        node.name: LaunchTime(
            launch.kind,
            launch.ranks,
            launch.nodes,
            launch.payload_bytes,
            times[node.number],
            node.predicted_us,
        )
        for node in record.nodes
        if node.event == "launch"
        for launch in (launched[node.number],)
    }
    # What a pass made may bear another node's name in the next schedule.
    own = {name: us for name, us in nodes.items() if known[name].original}
    every = ["link"] * len(layout.launches)
    return GraphTimes(record.phase, own, launches, waited_us(layout, ranks, every).get("link", 0.0))


def _total(segment: tuple[float, list[float]]) -> float:
    return segment[0]


def _longer(node: NodeTime, us: float) -> NodeTime:
    return NodeTime(node.operator, node.us + us, node.predicted_us, node.dtype, node.product)


def _host_us(layout: CodeLayout, ranks: Mapping[int, RankCalls]) -> list[float]:
    """Time of the host for each launch and wait itself, which computes nothing then: the median over all."""
    found = []
    for at in layout.syncs:
        launches = layout.events[at].startswith("launch")
        # A launch returns at once where the schedule is kept; a wait where it was waited for before.
        marks = [m for each in ranks.values() for m in (each.scheduled if launches else each.alone)]
        found.append(statistics.median(_event_us(m, at) for m in marks) if marks else 0.0)
    return found


def _launch_us(layout: CodeLayout, ranks: Mapping[int, RankCalls], calls: int) -> dict[int, float]:
    """Microseconds of each launch by its number."""
    found = {}
    for number in layout.launches:
        # Ranks of several groups may run one graph: each group is a link of its own, and the slowest counts.
        groups = {each.members[number] for each in ranks.values()}
        of_groups = []
        for members in groups:
            spans = _meetings(layout, ranks, members, calls)
            ahead = offsets(spans)
            of_groups.append(
                statistics.median(
                    max(spans[r][call, number][1] + ahead[r] for r in spans)
                    - max(spans[r][call, number][0] + ahead[r] for r in spans)
                    for call in range(calls)
                )
            )
        found[number] = max(0.0, 1e6 * max(of_groups, default=0.0))
    return found


def _meetings(
    layout: CodeLayout, ranks: Mapping[int, RankCalls], members: Sequence[int], calls: int
) -> dict[int, dict[tuple[int, int], tuple[float, float]]]:
    """Of each rank of a group: beginning and end of the launches that it waited for at once, by call and number."""
    return {
        rank: {
            (call, number): (marks[1 + 2 * at], marks[2 + 2 * at])
            for call, marks in enumerate(ranks[rank].alone[:calls])
            for number, at in layout.launches.items()
            if tuple(ranks[rank].members[number]) == tuple(members)
        }
        for rank in members
        if rank in ranks
    }


def early_us(layout: CodeLayout, ranks: Mapping[int, RankCalls]) -> dict[int, list[float]]:
    """By how much each rank began a scheduled call before the last one that it launches its first collective with.

    For so long the others' coming is waited for, and no link.
    """
    found = {rank: [0.0] * len(each.scheduled) for rank, each in ranks.items()}
    for members in {each.members[0] for each in ranks.values() if each.members}:
        here = {rank: ranks[rank] for rank in members if rank in ranks}
        alone = min((len(each.alone) for each in here.values()), default=0)
        ahead = offsets(_meetings(layout, here, members, alone)) if here else {}
        for call in range(min((len(each.scheduled) for each in here.values()), default=0)):
            begun = {rank: each.scheduled[call][0] + ahead[rank] for rank, each in here.items()}
            for rank, at in begun.items():
                if ranks[rank].members[0] == members:
                    found[rank][call] = 1e6 * (max(begun.values()) - at)
    return found


def offsets(
    spans: Mapping[int, Mapping[tuple[int, int], tuple[float, float]]],
) -> dict[int, float]:
    """Seconds to add to each rank's clock so that it shows the first one's time, by what they met in.

    ``spans``: of each rank, beginning and end of each meeting. One that is possible is 0, as on one host, then it is 0.
    """
    first, *others = sorted(spans)
    found = {first: 0.0}
    for rank in others:
        least, most = -math.inf, math.inf
        for meeting in spans[first].keys() & spans[rank].keys():
            (b0, e0), (b1, e1) = spans[first][meeting], spans[rank][meeting]
            least, most = max(least, b0 - e1), min(most, e0 - b1)
        found[rank] = 0.0 if least <= 0.0 <= most else (least + most) / 2
    return found


def waited_us(
    layout: CodeLayout, ranks: Mapping[int, RankCalls], links: Sequence[str]
) -> dict[str, float]:
    """Time of a scheduled call in which the compute stream stood still, by kind of link, as if all ranks began it together.

    On the rank that computed longest in that call: whoever computes less waits for that rank too, which is no time of the
    link, and its waits are not what lies between this rank's compute. ``links[n]``: the kind of link of the n-th launch.
    """
    early = early_us(layout, ranks)
    waits = [
        (at, links[number])
        for number, at in zip(layout.numbers, layout.syncs, strict=True)
        if layout.events[at].startswith("wait")
    ]
    count = min((len(each.scheduled) for each in ranks.values()), default=0)
    found: dict[str, list[float]] = {kind: [] for kind in links}
    for call in range(count):
        took = {rank: beside_links_us(layout, ranks[rank].scheduled[call]) for rank in ranks}
        slowest = max(took, key=took.__getitem__)
        marks = ranks[slowest].scheduled[call]
        own = _own_waits([(kind, _event_us(marks, at)) for at, kind in waits], early[slowest][call])
        for kind, us in found.items():
            us.append(own.get(kind, 0.0))
    return {kind: statistics.median(us) for kind, us in found.items() if us}


def _own_waits(waits: Sequence[tuple[str, float]], early_us: float) -> dict[str, float]:
    """Waits of a call by kind, the first of them without the time in which the last rank had not begun."""
    found: dict[str, float] = {}
    for kind, us in waits:
        others = min(us, early_us)
        early_us -= others
        found[kind] = found.get(kind, 0.0) + us - others
    return found


def beside_us(
    layout: CodeLayout, ranks: Mapping[int, RankCalls], links: Sequence[str]
) -> dict[str, float]:
    """Compute of a scheduled call between launches and waits of a kind of link, if possible of no other; of the slowest rank."""
    pending: dict[int, str] = {}
    alone: dict[str, list[int]] = {kind: [] for kind in links}
    mixed: dict[str, list[int]] = {kind: [] for kind in links}
    for i, (number, at) in enumerate(zip(layout.numbers, layout.syncs, strict=True)):
        if layout.events[at].startswith("launch"):
            pending[number] = links[number]
        else:
            pending.pop(number, None)
        kinds = set(pending.values())
        for kind in kinds:
            (alone if len(kinds) == 1 else mixed)[kind].append(i + 1)
    calls = [marks for each in ranks.values() for marks in each.scheduled]
    count = min((len(each.scheduled) for each in ranks.values()), default=0)
    if not calls or not count:
        return {}

    def took(call: int, segments: Sequence[int]) -> float:
        return max(
            sum(segment_us(layout, each.scheduled[call], n)[0] for n in segments)
            for each in ranks.values()
        )

    return {
        kind: statistics.median(took(call, alone[kind] or mixed[kind]) for call in range(count))
        for kind in alone
    }


def computed_us(layout: CodeLayout, marks: Marks) -> float:
    """Microseconds of a call outside of its launches and waits."""
    syncs = sum(_event_us(marks, at) for at in layout.syncs)
    return 1e6 * (marks[-1] - marks[0]) - syncs


def beside_links_us(layout: CodeLayout, marks: Marks) -> float:
    """Microseconds of a scheduled call in which the host computes or launches."""
    return computed_us(layout, marks) + sum(_event_us(marks, at) for at in layout.launches.values())


def stragglers(
    layout: CodeLayout, ranks: Mapping[int, RankCalls], least: float = 1.15
) -> dict[int, float]:
    """Ranks whose compute takes at least ``least`` times as long as on the median of the others, and the factor.

    By each rank's lower quartile of calls: a slow rank is slow in its best calls too, and what else a host does lengthens some.
    """
    own = {
        rank: _lower_quartile([computed_us(layout, marks) for marks in each.alone])
        for rank, each in ranks.items()
        if each.alone
    }
    found = {}
    for rank, us in own.items():
        others = [theirs for other, theirs in own.items() if other != rank]
        if others and us > least * statistics.median(others):
            found[rank] = us / statistics.median(others)
    return found


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]
