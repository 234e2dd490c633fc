"""Calls of all graphs on all ranks -> tables of times, one for each place in the program."""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes.machine.times.times import GraphTimes, LaunchTime, Times
from inductor_passes.records import GraphRecord
from inductor_passes.torch_compat.caches import torch_version
from inductor_passes.tuning.layout import CodeLayout, layout_of
from inductor_passes.tuning.merge import (
    RankCalls,
    beside_links_us,
    beside_us,
    computed_us,
    graph_times,
    stragglers,
    waited_us,
)
from inductor_passes.tuning.outliers import Outlier, outliers
from inductor_passes.tuning.stretch import Beside, Factors, stretches

# Kinds of links: between ranks of one node, and of several.
WITHIN, BETWEEN = "within", "between"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphCalls:
    """A graph and its calls on one rank. ``why_not``: why this rank cannot say what they took; empty if it can."""

    record: GraphRecord
    events: tuple[str, ...]
    calls: RankCalls
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; of the record, what a table is made of. Marks are whole nanoseconds."""
        empty = dataclasses.replace(self.record.after, spans=(), memory=())
        record = dataclasses.replace(self.record, passes=(), before=empty, after=empty, order=())
        return {
            "record": record.to_json(),
            "events": self.events,
            "alone": [[round(1e9 * t) for t in marks] for marks in self.calls.alone],
            "scheduled": [[round(1e9 * t) for t in marks] for marks in self.calls.scheduled],
            "members": self.calls.members,
            "shares": self.calls.shares,
            "why_not": self.why_not,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GraphCalls:
        """Inverse of ``to_json``."""
        alone, scheduled = (
            tuple(tuple(t / 1e9 for t in marks) for marks in data[way])
            for way in ("alone", "scheduled")
        )
        members = tuple(tuple(each) for each in data["members"])
        return cls(
            GraphRecord.from_json(data["record"]),
            tuple(data["events"]),
            RankCalls(alone, scheduled, members, data["shares"]),
            data["why_not"],
        )


@dataclass(frozen=True, slots=True)
class Merged:
    """``tables`` by place; ``slow``: ranks whose compute takes longer than that of others, and how many times.

    ``outliers``: calls as scheduled, by number, that took much longer than others. ``left``: a line for each graph that has no times.
    """

    tables: Mapping[str, Times]
    slow: Mapping[int, float]
    outliers: tuple[Outlier, ...] = ()
    left: tuple[str, ...] = ()


def merged(
    of_ranks: Mapping[int, Sequence[GraphCalls]],
    steps: int,
    world: int,
    probes: Sequence[LaunchTime] = (),
) -> Merged:
    """Make one table for each place from the calls of all ranks. A graph whose code is in another order is left out.

    ``probes``: launches of other payloads than the graphs', by themselves.
    """
    by_graph: dict[str, dict[int, GraphCalls]] = {}
    for rank, graphs in of_ranks.items():
        for each in graphs:
            by_graph.setdefault(each.record.graph, {})[rank] = each
    places: dict[str, dict[str, GraphTimes]] = {}
    machines: dict[str, str] = {}
    slow: dict[int, float] = {}
    left: list[str] = []
    beside = []
    took: dict[int, list[float]] = {}
    computed: dict[int, list[float]] = {}
    for name, ranks in by_graph.items():
        record = ranks[min(ranks)].record
        calls = {rank: each.calls for rank, each in ranks.items() if each.calls.alone}
        layout = layout_of(record.nodes, ranks[min(ranks)].events)
        alike = {(each.events, each.record.nodes) for each in ranks.values()}
        unread = [f"on rank {rank} {each.why_not}" for rank, each in ranks.items() if each.why_not]
        if unread or layout is None or not calls or len(alike) > 1:
            why = unread[0] if unread else _why_not(layout, calls)
            left.append(f"graph {record.graph_id} is not timed: {why}")
            log.warning("G%s.", left[-1][1:])
            continue
        times = graph_times(record, layout, calls, _launched(record))
        times = as_it_ran(times, _beside_us(layout, calls))
        places.setdefault(record.place, {})[name] = times
        machines[record.place] = record.machine
        for rank, factor in stragglers(layout, calls).items():
            slow[rank] = max(factor, slow.get(rank, 1.0))
        for rank, ran in calls.items():
            whole = [1e6 * (marks[-1] - marks[0]) for marks in ran.scheduled]
            _add(took, rank, whole)
            _add(computed, rank, [computed_us(layout, marks) for marks in ran.scheduled])
        links, sorts = _links(record), _sorts(record)
        beside.append(
            Beside(
                record.nodes,
                _channels(record),
                links,
                sorts,
                times,
                _beside_us(layout, calls),
                beside_us(layout, calls, links),
                waited_us(layout, calls, sorts),
            )
        )
    factors = stretches(beside)
    for graph in beside:
        for node in graph.nodes:
            if node.event == "launch":
                launch = graph.times.launches[node.name]
                stretch = factors.of_launch[graph.sorts[node.number]]
                graph.times.launches[node.name] = dataclasses.replace(launch, stretch=stretch)
    overall = {link: _overall(beside, link, factors) for link in factors.of_compute}
    of_compute, of_launch = overall.get(WITHIN) or overall.get(BETWEEN) or (1.0, 1.0)
    launches = [
        launch
        for graphs in places.values()
        for g in graphs.values()
        for launch in g.launches.values()
    ]
    probed = [
        dataclasses.replace(
            probe, stretch=factors.of_launch.get(_sort(_link(probe.nodes), probe.kind), 1.0)
        )
        for probe in probes
    ]
    tables = {}
    for place, timed in places.items():
        own = {id(launch) for g in timed.values() for launch in g.launches.values()}
        tables[place] = Times(
            machine=machines[place],
            torch=torch_version(),
            world=world,
            steps=steps,
            graphs=timed,
            probes=(*(launch for launch in launches if id(launch) not in own), *probed),
            compute_stretch=of_compute,
            launch_stretch=of_launch,
            inter_stretch=overall.get(BETWEEN) if WITHIN in overall else None,
        )
    return Merged(tables, slow, outliers(took, computed), tuple(left))


def _add(of_ranks: dict[int, list[float]], rank: int, us: Sequence[float]) -> None:
    """Add a graph's calls to a rank's steps; one that is not called once in each step has none of its own."""
    known = of_ranks.get(rank)
    if known is None:
        of_ranks[rank] = list(us)
    elif len(known) == len(us):
        of_ranks[rank] = [a + b for a, b in zip(known, us, strict=True)]


def as_it_ran(times: GraphTimes, computed_us: float) -> GraphTimes:
    """Times of nodes that add up to no more than the compute of a scheduled call.

    In a call whose launches are waited for at once each stretch of compute counts as on the rank that was slowest then: where ranks are
    late in turn, these are more than any rank computes in a step that waits for nobody.
    """
    total = sum(node.us for node in times.nodes.values())
    if not 0.0 < computed_us < total:
        return times
    factor = computed_us / total
    nodes = {
        name: dataclasses.replace(node, us=node.us * factor) for name, node in times.nodes.items()
    }
    return dataclasses.replace(times, nodes=nodes)


def _why_not(layout: CodeLayout | None, calls: Mapping[int, RankCalls]) -> str:
    if layout is None:
        return "its code launches in another order than the graph"
    return "ranks have other code for it" if calls else "it was not called"


def _launched(record: GraphRecord) -> list[LaunchTime]:
    hosts = [node.hosts for node in record.nodes if node.event == "launch"]
    return [
        LaunchTime(c.kind, c.group_size, max(1, on), c.payload_bytes, 0.0, c.predicted_us)
        for c, on in zip(record.collectives, hosts, strict=True)
    ]


def _channels(record: GraphRecord) -> list[str]:
    return [collective.group_name for collective in record.collectives]


def _links(record: GraphRecord) -> list[str]:
    hosts = [node.hosts for node in record.nodes if node.event == "launch"]
    return [_link(on) for on in hosts]


def _link(nodes: int) -> str:
    return BETWEEN if nodes > 1 else WITHIN


def _sorts(record: GraphRecord) -> list[str]:
    """Of each launch, its link and kind: those of one sort are slowed alike, by compute and by what they queue behind."""
    kinds = [collective.kind for collective in record.collectives]
    return [_sort(link, kind) for link, kind in zip(_links(record), kinds, strict=True)]


def _sort(link: str, kind: str) -> str:
    return f"{link} {kind}"


def _overall(graphs: Sequence[Beside], link: str, factors: Factors) -> tuple[float, float]:
    """Both factors of a kind of link; of its launches, together."""
    own = [
        graph.times.launches[node.name]
        for graph in graphs
        for node in graph.nodes
        if node.event == "launch" and graph.links[node.number] == link
    ]
    alone = sum(launch.us for launch in own)
    together = sum(launch.us * launch.stretch for launch in own)
    return factors.of_compute[link], together / alone if alone > 0 else 1.0


def _beside_us(layout: CodeLayout, calls: Mapping[int, RankCalls]) -> float:
    """Compute of a call as scheduled, on the slowest rank of each: the median over calls, host's time included."""
    count = min(len(each.scheduled) for each in calls.values())
    if not count:
        return 0.0
    return statistics.median(
        max(beside_links_us(layout, each.scheduled[call]) for each in calls.values())
        for call in range(count)
    )


def pack(graphs: Sequence[GraphCalls]) -> str:
    """One rank's calls as text."""
    return json.dumps([each.to_json() for each in graphs])


def unpack(text: str) -> list[GraphCalls]:
    """Inverse of ``pack``."""
    return [GraphCalls.from_json(each) for each in json.loads(text)]
