"""Stretch, both ways: what compute costs collectives beside it, and they it, from steps that ran as scheduled.

Both are measured by themselves in steps whose launches are waited for at once. Run by the simulator's rules these times
give the compute and the standing still of a scheduled step, if neither disturbed the other; the factors are those by which
they give what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inductor_passes.machine.times.times import GraphTimes
from inductor_passes.records import NodeRecord
from inductor_passes.simulate.execution import Execution, Program, execute

MOST = 10.0
_ROUNDS, _HALVINGS = 6, 30


def stretches(
    graphs: Sequence[tuple[Sequence[NodeRecord], Sequence[str], GraphTimes, float]],
) -> tuple[float, float]:
    """Factors on compute beside a collective, and on a collective beside compute; at least 1 and at most ``MOST``.

    ``graphs``: nodes in order, the group of each launch, times of each by itself, and the compute of a scheduled call in
    microseconds.
    """
    computed = sum(us for *_, us in graphs)
    waited = sum(times.waited_us for _, _, times, _ in graphs)
    of_compute = of_launch = 1.0

    def run() -> list[Execution]:
        return [
            execute(_program(nodes, groups, times, of_compute, of_launch))
            for nodes, groups, times, _ in graphs
        ]

    for _ in range(_ROUNDS):

        def compute_of(factor: float) -> float:
            nonlocal of_compute
            of_compute = factor
            return sum(each.compute_us for each in run())

        of_compute = _least(compute_of, computed)

        def waited_of(factor: float) -> float:
            nonlocal of_launch
            of_launch = factor
            return sum(each.exposed_us for each in run())

        of_launch = _least(waited_of, waited)
    return of_compute, of_launch


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


def _program(
    nodes: Sequence[NodeRecord],
    groups: Sequence[str],
    times: GraphTimes,
    of_compute: float,
    of_launch: float,
) -> Program:
    at = {node.number: i for i, node in enumerate(nodes) if node.event == "launch"}
    program = Program([], [], [], [], of_compute)
    for node in nodes:
        launch = times.launches.get(node.name)
        found = times.nodes.get(node.name)
        program.compute_us.append(found.us if found is not None else 0.0)
        program.channel.append(groups[node.number] if node.event == "launch" else "")
        program.link_us.append(launch.us * of_launch if launch is not None else 0.0)
        program.awaits.append(
            (at[node.number],) if node.event == "wait" and node.number in at else ()
        )
    return program
