"""Solutions by what was solved: graphs of one process are often equal, as those of layers that are compiled one by one."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields

from inductor_passes.schedule.model.problem import Node, Problem
from inductor_passes.schedule.model.solution import Solution
from inductor_passes.schedule.solver.solve import solve

MOST = 32  # solutions that are kept, the latest
_known: OrderedDict[tuple[object, ...], Solution] = OrderedDict()


def solve_once(
    problem: Problem,
    *,
    extra_memory_ratio: float = 0.05,
    extra_memory_bytes: int = 2**30,
    bucket: bool = True,
) -> Solution:
    """Return what ``solve`` returns, at once where this process has solved an equal problem with equal arguments."""
    key = (digest(problem), extra_memory_ratio, extra_memory_bytes, bucket)
    if key not in _known:
        _known[key] = solve(
            problem,
            extra_memory_ratio=extra_memory_ratio,
            extra_memory_bytes=extra_memory_bytes,
            bucket=bucket,
        )
    _known.move_to_end(key)
    while len(_known) > MOST:
        _known.popitem(last=False)
    return _known[key]


def digest(problem: Problem) -> str:
    """Digest of all that a solution depends on: everything but names."""
    nodes = [tuple(getattr(node, name) for name in _OF_NODES) for node in problem.nodes]
    links = sorted(
        (group, op, tuple(points))
        for group, tables in problem.links.items()
        for op, points in tables.items()
    )
    rest = [_plain(getattr(problem, name)) for name in _OF_PROBLEMS]
    return hashlib.sha256(repr((nodes, links, rest)).encode()).hexdigest()


# A field that is added to either is part of the digest.
_OF_NODES = [field.name for field in fields(Node) if field.name != "name"]
_OF_PROBLEMS = [f.name for f in fields(Problem) if f.name not in ("name", "nodes", "links")]


def _plain(value: object) -> object:
    return sorted(value.items()) if isinstance(value, Mapping) else value
