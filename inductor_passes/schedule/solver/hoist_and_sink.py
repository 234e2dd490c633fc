"""Hoist every launch and sink every wait as far as they go: the overlap that a local rule finds.

A candidate beside those of the search.
"""

from __future__ import annotations

from inductor_passes.schedule.model.problem import Problem, Schedule


def hoist_and_sink(problem: Problem) -> Schedule:
    """Compute in program order; launches right behind their inputs, waits right before their users.

    No launch passes a collective of its group that blocks compute: that would wait for it.
    """
    nodes = problem.nodes
    count = len(nodes)
    # Compute stands at its number, a launch half behind what it needs, a wait a quarter behind what is
    # in front of its first user; no wait moves up, so that a launch may rely on its place.
    behind = list(range(count))
    blocked: dict[str, int] = {}  # by group, behind what its last collective that blocks stands
    for i, node in enumerate(nodes):
        if node.kind == "launch":
            behind[i] = max((behind[d] for d in node.deps), default=-1)
            behind[i] = max(behind[i], blocked.get(node.group, -1))
        elif node.blocks:
            blocked[node.group] = i
    first_user = [count] * count
    for i in range(count - 1, -1, -1):
        if nodes[i].kind == "wait":
            behind[i] = max(i, first_user[i] - 1)
        for d in nodes[i].deps:
            user = behind[i] + 1 if nodes[i].kind == "launch" else behind[i]
            first_user[d] = min(first_user[d], user)
    offset = {"launch": 0.5, "wait": 0.25}
    place = [behind[i] + offset.get(node.kind, 0.0) for i, node in enumerate(nodes)]
    return Schedule(tuple(sorted(range(count), key=lambda i: (place[i], i))))
