"""Steps of a scheduler, over tasks, to a schedule of nodes."""

from __future__ import annotations

from typing import NamedTuple

from inductor_passes.schedule.model.problem import Schedule
from inductor_passes.schedule.model.tasks import Tasks


class Step(NamedTuple):
    """Run ``tasks``: one of compute, or the launches of one bucket. ``waits``: wait for those."""

    tasks: tuple[int, ...]
    waits: bool = False


def expand(tasks: Tasks, steps: list[Step]) -> Schedule:
    """The order of the nodes. A launch that no step waits for is waited for right before its first reader."""
    nodes = tasks.problem.nodes
    order = list(tasks.at_start)
    buckets: list[tuple[int, ...]] = []
    pending: dict[int, None] = {}

    def wait(launches: tuple[int, ...]) -> None:
        behind = sorted(i for t in launches for i in tasks.behind[t])
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
    for t in list(pending):
        wait((t,))
    return Schedule(tuple(order), tuple(buckets))
