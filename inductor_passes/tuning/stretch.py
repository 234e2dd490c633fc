"""Stretch, both ways: what compute costs collectives beside it, and they it, from steps that ran as scheduled.

Both are measured by themselves in steps whose launches are waited for at once. Run by the simulator's rules these times
give the compute and the standing still of a scheduled step, if neither disturbed the other; the factors are those by which
they give what was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inductor_passes.machine.times.times import GraphTimes
from inductor_passes.records import NodeRecord
from inductor_passes.simulate.execution import Execution, Program, execute

MOST = 10.0
_ROUNDS, _HALVINGS = 6, 30


@dataclass(frozen=True, slots=True)
class Beside:
    """A graph as it ran: ``nodes`` in order, the group of each launch and of its link, times of each by itself.

    ``links[n]``: the kind of link of the n-th launch, any word; ``sorts[n]``: those of one sort are slowed alike. ``computed_us``: the
    compute of a scheduled call, ``computed_beside_us``: that between launch and wait of a kind of link; ``waited_us``: how long the
    stream stood still for a sort of launches.
    """

    nodes: Sequence[NodeRecord]
    groups: Sequence[str]
    links: Sequence[str]
    sorts: Sequence[str]
    times: GraphTimes
    computed_us: float
    computed_beside_us: Mapping[str, float]
    waited_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Factors:
    """``of_compute``: by kind of link, on compute beside its collectives. ``of_launch``: by sort, on these beside compute."""

    of_compute: Mapping[str, float]
    of_launch: Mapping[str, float]


def stretches(graphs: Sequence[Beside]) -> Factors:
    """Find the factors by which graphs give what they took; at least 1, at most ``MOST``."""
    links = sorted({link for graph in graphs for link in graph.links})
    sorts = sorted({sort for graph in graphs for sort in graph.sorts})
    of_compute, of_launch = dict.fromkeys(links, 1.0), dict.fromkeys(sorts, 1.0)

    def run() -> list[Execution]:
        return [execute(program_of(graph, of_compute, of_launch)) for graph in graphs]

    def compute_of(link: str, factor: float) -> float:
        of_compute[link] = factor
        if len(links) == 1:
            return sum(ran.compute_us for ran in run())
        found = 0.0
        for graph, ran in zip(graphs, run(), strict=True):
            at = beside(graph.nodes, graph.links).get(link, ())
            found += sum(ran.end[i] - ran.start[i] for i in at)
        return found

    def waited_of(sort: str, factor: float) -> float:
        of_launch[sort] = factor
        found = 0.0
        for graph, ran in zip(graphs, run(), strict=True):
            for i, node in enumerate(graph.nodes):
                if node.event == "launch" and graph.sorts[node.number] == sort:
                    found += ran.exposed[i]
        return found

    for _ in range(_ROUNDS):
        for link in links:
            computed = sum(
                graph.computed_us if len(links) == 1 else graph.computed_beside_us.get(link, 0.0)
                for graph in graphs
            )
            of_compute[link] = _least(functools.partial(compute_of, link), computed)
        for sort in sorts:
            waited = sum(graph.waited_us.get(sort, 0.0) for graph in graphs)
            of_launch[sort] = _least(functools.partial(waited_of, sort), waited)
    return Factors(of_compute, of_launch)


def beside(nodes: Sequence[NodeRecord], links: Sequence[str]) -> dict[str, set[int]]:
    """Of each kind of link, nodes by index that stand between launch and wait of it, if possible of no other."""
    pending: dict[int, str] = {}
    alone: dict[str, set[int]] = {link: set() for link in links}
    mixed: dict[str, set[int]] = {link: set() for link in links}
    for i, node in enumerate(nodes):
        if node.event == "launch":
            pending[node.number] = links[node.number]
        elif node.event == "wait":
            pending.pop(node.number, None)
        else:
            kinds = set(pending.values())
            for kind in kinds:
                (alone if len(kinds) == 1 else mixed)[kind].add(i)
    return {link: alone[link] or mixed[link] for link in links}


def _least(value: Callable[[float], float], wanted: float) -> float:
    """The least factor from 1 to ``MOST`` by which a value that grows with it reaches ``wanted``."""
    if value(1.0) >= wanted:
        return 1.0
    low, high = 1.0, MOST
    if value(high) <= value(low):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if value(middle) >= wanted else (middle, high)
    return high


def program_of(
    graph: Beside, of_compute: Mapping[str, float], of_launch: Mapping[str, float]
) -> Program:
    """The graph by the simulator's rules, with these factors."""
    at = {node.number: i for i, node in enumerate(graph.nodes) if node.event == "launch"}
    own = {group: of_compute[link] for group, link in zip(graph.groups, graph.links, strict=True)}
    program = Program([], [], [], [], stretches=own)
    for node in graph.nodes:
        launch = graph.times.launches.get(node.name)
        found = graph.times.nodes.get(node.name)
        here = node.event == "launch"
        program.compute_us.append(found.us if found is not None else 0.0)
        program.channel.append(graph.groups[node.number] if here else "")
        program.link_us.append(
            launch.us * of_launch[graph.sorts[node.number]] if launch is not None and here else 0.0
        )
        program.awaits.append(
            (at[node.number],) if node.event == "wait" and node.number in at else ()
        )
    return program
