"""Schedule problems and schedules as JSON, plain or gzipped.

A problem is an object with ``name``, ``nodes`` (objects with the keys of ``Node`` that apply to their
kind), ``links`` ({group: {op: [[payload_MiB, microseconds], ...]}}), ``copy_bytes_per_us`` and
``group_size``. A schedule is ``{"order": [node ids], "buckets": [[launch ids], ...]}``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.check_problem import check_problem
from inductor_passes.schedule.problem import Node, Problem, Schedule

_T = TypeVar("_T")
_OF_LAUNCHES = ("group", "op", "dtype", "payload")


def load_problem(path: str | Path) -> Problem:
    """Read and check a problem. Raises ``ProblemError``, one line, if it is not one."""
    return problem_from_json(_read(Path(path)))


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem; gzipped if the name ends in ``.gz``."""
    text = json.dumps(problem_to_json(problem))
    if Path(path).suffix == ".gz":
        # No time stamp: equal problems give equal files.
        Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        Path(path).write_text(text, encoding="utf-8")


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule; ``judge`` says whether it fits a problem."""
    data = _mapping(_read(Path(path)), "The schedule")
    order = _field(data, "order", "The schedule", _ids)
    buckets = _sequence(data.get("buckets") or [], "'buckets'")
    return Schedule(order, tuple(_ids(members) for members in buckets))


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule."""
    data = {"order": schedule.order, "buckets": schedule.buckets}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The problem as JSON values, with the keys in this module's docstring."""
    return {
        "name": problem.name,
        "nodes": [_node_to_json(node) for node in problem.nodes],
        "links": {group: dict(tables) for group, tables in problem.links.items()},
        "copy_bytes_per_us": problem.copy_bytes_per_us,
        "group_size": dict(problem.group_size),
    }


def problem_from_json(data: object) -> Problem:
    """Build and check a problem. Raises ``ProblemError``, one line, naming the node or key."""
    top = _mapping(data, "The problem")
    what = "The problem"
    problem = Problem(
        name=_field(top, "name", what, str),
        nodes=tuple(
            _node_from_json(i, node)
            for i, node in enumerate(_field(top, "nodes", what, lambda v: _sequence(v, "'nodes'")))
        ),
        links=_field(top, "links", what, _links),
        copy_bytes_per_us=_field(top, "copy_bytes_per_us", what, float),
        group_size=_field(top, "group_size", what, _sizes),
    )
    check_problem(problem)
    return problem


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": node.name,
        "kind": node.kind,
        "deps": node.deps,
        "us": node.us,
        "bytes": node.bytes,
        "alias": node.alias,
    }
    if node.kind == "launch":
        data.update({key: getattr(node, key) for key in (*_OF_LAUNCHES, "reduce")})
    if node.kind == "wait":
        data["launch"] = node.launch
    return data


def _node_from_json(i: int, data: object) -> Node:
    what = f"Node {i}"
    node = _mapping(data, what)
    kind = _field(node, "kind", what, str)
    launch = kind == "launch"
    return Node(
        name=str(node.get("name", i)),
        kind=kind,
        deps=_field(node, "deps", what, _ids),
        us=_field(node, "us", what, float),
        bytes=_field(node, "bytes", what, int),
        alias=_optional_id(node, "alias", what),
        group=_field(node, "group", what, str) if launch else "",
        op=_field(node, "op", what, str) if launch else "",
        dtype=_field(node, "dtype", what, str) if launch else "",
        reduce=None if node.get("reduce") is None else str(node["reduce"]),
        payload=_field(node, "payload", what, int) if launch else 0,
        launch=_optional_id(node, "launch", what) if kind == "wait" else None,
    )


def _read(path: Path) -> object:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ProblemError(f"Cannot read {path}: {error.strerror}.") from None
    try:
        # A corrupt archive raises OSError too.
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ProblemError(f"{path} is not JSON: {error}.") from None


def _field(data: Mapping[str, Any], key: str, what: str, convert: Callable[[Any], _T]) -> _T:
    if key not in data:
        raise ProblemError(f"{what} has no {key!r}.")
    try:
        return convert(data[key])
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"{what} has a {key!r} that does not fit: {error}.") from None


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ProblemError(f"{what} is not a JSON object.")
    return value


def _sequence(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProblemError(f"{what} is not a JSON list.")
    return value


def _ids(value: object) -> tuple[int, ...]:
    ids = _sequence(value, "A list of node ids")
    wrong = next((i for i in ids if type(i) is not int), None)
    if wrong is not None:
        raise ProblemError(f"{wrong!r} is not a node id.")
    return tuple(ids)


def _optional_id(data: Mapping[str, Any], key: str, what: str) -> int | None:
    value = data.get(key)
    if value is not None and type(value) is not int:
        raise ProblemError(f"{what} has {value!r} as {key!r}, which is not a node id.")
    return value


def _links(value: object) -> dict[str, dict[str, tuple[tuple[float, float], ...]]]:
    return {
        group: {
            op: tuple((float(mib), float(us)) for mib, us in points)
            for op, points in _mapping(tables, f"The links of group {group!r}").items()
        }
        for group, tables in _mapping(value, "'links'").items()
    }


def _sizes(value: object) -> dict[str, int]:
    return {group: int(size) for group, size in _mapping(value, "'group_size'").items()}
