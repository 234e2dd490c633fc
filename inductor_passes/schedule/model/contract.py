"""Groups of a problem's nodes that always move together.

Four kinds of node never profit from standing apart: views and waits join what they view or wait for;
cheap compute that waits for nothing and has one reader (the cast of a parameter in front of its gather)
joins that reader; chains of compute join while they are short; inputs and views of inputs stand first.
Each join contracts edges into a group with no other way in, or out of one with no other way out, so that
no cycle can appear.
"""

from __future__ import annotations

from collections.abc import Iterable

from inductor_passes.schedule.model.problem import Problem

AT_START = -1  # the group of inputs and views of inputs: they cost nothing and stand first
GRAIN = 2000  # a joined task takes at most this part of all compute


def group_nodes(problem: Problem) -> list[int]:
    """For each node the node that names its group, or ``AT_START``. Linear in nodes and edges."""
    group = _views(problem)
    us = [node.us for node in problem.nodes]
    is_compute = [node.kind == "compute" and not node.blocks for node in problem.nodes]
    grain = sum(us) / GRAIN

    before, after = _neighbours(problem, group)
    into: dict[int, int] = {}
    for g in sorted(before):
        if not before[g] and len(after[g]) == 1 and is_compute[g] and us[g] <= grain:
            (reader,) = after[g]
            if problem.nodes[reader].blocks:
                continue
            into[g] = reader
            us[reader] += us[g] if is_compute[reader] else 0.0
            del before[reader][g]
    group = [_follow(into, g) for g in group]

    before, after = _neighbours(problem, group)
    into = {}
    for g in sorted(before):
        if len(before[g]) != 1 or not is_compute[g]:
            continue
        (above,) = before[g]
        first = _follow(into, above)
        if len(after[above]) == 1 and is_compute[above] and us[first] + us[g] <= grain:
            into[g] = first
            us[first] += us[g]
    return [_follow(into, g) for g in group]


def _views(problem: Problem) -> list[int]:
    """Groups after views and waits have joined what they view; each is named by its first node."""
    group: list[int] = []
    for i, node in enumerate(problem.nodes):
        deps: Iterable[int] = node.deps
        if node.launch is not None:
            # What the launch reads may be named to be kept until then; the launch is behind it anyway.
            deps = {*node.deps, node.launch} - set(problem.nodes[node.launch].deps)
        before = {group[d] for d in deps} - {AT_START}
        if node.kind == "input" or (not before and costs_nothing(problem, i)):
            group.append(AT_START)
        elif len(before) == 1 and (node.launch is not None or costs_nothing(problem, i)):
            group.append(*before)
        else:
            group.append(i)
    return group


def costs_nothing(problem: Problem, i: int) -> bool:
    """Neither time nor memory: a view, or a wait for a value launched outside the graph."""
    node = problem.nodes[i]
    free = node.us == 0 and (node.bytes == 0 or node.alias is not None)
    return free and node.launch is None and node.kind in ("compute", "wait")


def _neighbours(
    problem: Problem, group: list[int]
) -> tuple[dict[int, dict[int, None]], dict[int, dict[int, None]]]:
    """Groups before and after each group, as ordered sets."""
    before: dict[int, dict[int, None]] = {}
    after: dict[int, dict[int, None]] = {}
    for g in group:
        if g != AT_START:
            before.setdefault(g, {})
            after.setdefault(g, {})
    for i, node in enumerate(problem.nodes):
        for d in node.deps:
            if AT_START != group[d] != group[i]:
                before[group[i]][group[d]] = None
                after[group[d]][group[i]] = None
    return before, after


def _follow(into: dict[int, int], g: int) -> int:
    while g in into:
        g = into[g]
    return g
