"""Is a schedule problem well formed? The first thing that is wrong, as a one-line error."""

from __future__ import annotations

import itertools
import math
from graphlib import CycleError, TopologicalSorter

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.model.problem import KINDS, Node, Problem

_LEAST_MIB = 1e-9  # a thousandth of a byte; with less, slopes would leave the range of floats


def check_problem(problem: Problem) -> None:
    """Raise ``ProblemError`` unless every rule of ``problem.py`` holds. Linear in nodes and edges."""
    _check_tables(problem)
    for i, node in enumerate(problem.nodes):
        _check_references(problem, i, node)
        _check_numbers(i, node)
    for i, node in enumerate(problem.nodes):
        if any(d >= i for d in node.deps):
            _refuse_order(problem)
        if node.alias is not None and node.alias >= i:
            raise ProblemError(
                f"Node {i} shares the memory of node {node.alias}, which is not before it."
            )
        if node.launch is not None and node.launch >= i:
            raise ProblemError(f"Wait {i} stands before launch {node.launch}, which it waits for.")


def _check_tables(problem: Problem) -> None:
    if not _positive(problem.copy_bytes_per_us):
        raise ProblemError(
            f"copy_bytes_per_us is {problem.copy_bytes_per_us}, not a positive number."
        )
    if not (math.isfinite(problem.compute_stretch) and problem.compute_stretch >= 1.0):
        raise ProblemError(f"compute_stretch is {problem.compute_stretch}, not a number from 1 on.")
    for group, size in problem.group_size.items():
        if size < 1:
            raise ProblemError(f"Group {group!r} has {size} ranks.")
    for group, tables in problem.links.items():
        if not tables:
            raise ProblemError(f"Group {group!r} has no link table.")
        for op, points in tables.items():
            if len(points) < 2:
                raise ProblemError(f"The link table of {op} on group {group!r} needs two points.")
            sizes = [x for x, _ in points]
            if sizes[0] < _LEAST_MIB or any(b <= a for a, b in itertools.pairwise(sizes)):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} is not by growing size."
                )
            if any(not math.isfinite(us) or us < 0 for _, us in points):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} has a negative cost."
                )
            if any(b[1] < a[1] for a, b in itertools.pairwise(points)):
                raise ProblemError(
                    f"The link table of {op} on group {group!r} has a larger payload that costs less."
                )


def _check_references(problem: Problem, i: int, node: Node) -> None:
    count = len(problem.nodes)
    if node.kind not in KINDS:
        raise ProblemError(
            f"Node {i} is of unknown kind {node.kind!r}; kinds are {', '.join(KINDS)}."
        )
    for key, named in (("deps", node.deps), ("alias", (node.alias,)), ("launch", (node.launch,))):
        for other in named:
            if other is not None and not 0 <= other < count:
                raise ProblemError(
                    f"Node {i} names node {other} in {key!r}; there are {count} nodes."
                )
    if node.kind == "launch" and node.group not in problem.links:
        raise ProblemError(f"Launch {i} is on unknown group {node.group!r}: it has no link table.")
    if node.kind == "launch" and node.group not in problem.group_size:
        raise ProblemError(f"Launch {i} is on unknown group {node.group!r}: it has no group size.")
    if node.launch is not None and node.kind != "wait":
        raise ProblemError(f"Node {i} waits for launch {node.launch} but is of kind {node.kind!r}.")
    if node.launch is not None and problem.nodes[node.launch].kind != "launch":
        raise ProblemError(f"Wait {i} waits for node {node.launch}, which is no launch.")


def _check_numbers(i: int, node: Node) -> None:
    for key, value in (("us", node.us), ("bytes", node.bytes), ("payload", node.payload)):
        if not math.isfinite(value) or value < 0:
            raise ProblemError(f"Node {i} has a negative or infinite cost: {key!r} is {value}.")
    if node.us > 0 and node.kind != "compute":
        raise ProblemError(f"Node {i} is of kind {node.kind!r} but takes {node.us} us of compute.")


def _refuse_order(problem: Problem) -> None:
    try:
        TopologicalSorter({i: node.deps for i, node in enumerate(problem.nodes)}).prepare()
    except CycleError as error:
        path = " -> ".join(str(i) for i in error.args[1])
        raise ProblemError(f"The dependencies have a cycle: {path}.") from None
    late = next((i, d) for i, n in enumerate(problem.nodes) for d in n.deps if d >= i)
    raise ProblemError(
        f"Node {late[0]} stands before its dependency {late[1]}: nodes must be in program order."
    )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
