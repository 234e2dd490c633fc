"""The overlap that a local rule finds: every launch as early, every wait as late as its neighbours allow."""

from __future__ import annotations

from inductor_passes.schedule.problem import Problem, Schedule


def launches_early_waits_late(problem: Problem) -> Schedule:
    """Compute in program order; launches right behind their inputs, waits right before their users."""
    nodes = problem.nodes
    count = len(nodes)
    place = [float(i) for i in range(count)]
    ready = [-1] * count  # place behind which a node may stand
    for i, node in enumerate(nodes):
        behind = max((ready[d] for d in node.deps), default=-1)
        ready[i] = behind if node.kind == "launch" else i
    needed = list(range(count))
    first_user = [count] * count
    for i in range(count - 1, -1, -1):
        if nodes[i].kind == "wait":
            needed[i] = max(i, first_user[i] - 1)
        for d in nodes[i].deps:
            first_user[d] = min(first_user[d], needed[i] if nodes[i].kind == "wait" else i)
    for i, node in enumerate(nodes):
        if node.kind == "launch":
            place[i] = ready[i] + 0.5
        elif node.kind == "wait":
            place[i] = needed[i] + 0.25
    return Schedule(tuple(sorted(range(count), key=lambda i: (place[i], i))))
