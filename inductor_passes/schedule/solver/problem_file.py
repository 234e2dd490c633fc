"""Schedule problems and schedules as JSON, plain or gzipped.

A problem is an object with ``name``, ``nodes`` (objects with the keys of ``Node`` that apply to
their kind), ``links`` ({group: {op: [[payload_MiB, microseconds], ...]}}), ``copy_bytes_per_us``,
``group_size`` and, if it is not 1, ``compute_stretch``. A schedule is ``{"order": [node ids],
"buckets": [[launch ids], ...]}``.
"""

from __future__ import annotations

import json
from pathlib import Path

from inductor_passes.errors import ProblemError
from inductor_passes.files import Form, JsonObject, load
from inductor_passes.schedule.solver.problem import Node, Problem, Schedule, check_problem

_OF_LAUNCHES = ("group", "op", "dtype", "payload")
_TEXT = {"type": "string"}
_AMOUNT = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 0}
_ID = {"type": "integer"}
_IDS = {"type": "array", "items": _ID}
_POINT = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_NODE = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "integer"]},
        "kind": _TEXT,
        "deps": _IDS,
        "us": _AMOUNT,
        "bytes": _COUNT,
        "alias": {"type": ["integer", "null"]},
        "launch": {"type": ["integer", "null"]},
        "group": _TEXT,
        "op": _TEXT,
        "dtype": _TEXT,
        "reduce": {"type": ["string", "null"]},
        "payload": _COUNT,
    },
    "required": ["kind", "deps", "us", "bytes"],
}
_LINKS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "additionalProperties": {"type": "array", "items": _POINT},
    },
}
PROBLEM = Form(
    name="schedule problem",
    error=ProblemError,
    fix="inductor_passes/schedule/solver/problem_file.py says what it holds.",
    schema={
        "type": "object",
        "properties": {
            "name": _TEXT,
            "nodes": {"type": "array", "items": _NODE},
            "links": _LINKS,
            # With less, times would leave the range of floats.
            "copy_bytes_per_us": {"type": "number", "minimum": 1e-9},
            "group_size": {
                "type": "object",
                "additionalProperties": {"type": "integer", "minimum": 1},
            },
            "compute_stretch": {"type": "number", "minimum": 1},
        },
        "required": ["name", "nodes", "links", "copy_bytes_per_us", "group_size"],
    },
)


def load_problem(path: str | Path) -> Problem:
    """Read and check a problem. Raises ``ProblemError``, one line, if it is not one."""
    return problem_of(load(path, PROBLEM), str(path))


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule."""
    data = {"order": schedule.order, "buckets": schedule.buckets}
    Path(path).write_text(json.dumps(data) + "\n", encoding="utf-8")


def problem_of(data: JsonObject, file: str = "") -> Problem:
    """The problem that checked JSON values are; ``file`` is its name in errors."""
    problem = Problem(
        name=data["name"],
        nodes=tuple(_node(i, node, file) for i, node in enumerate(data["nodes"])),
        links={
            group: {op: tuple((mib, us) for mib, us in points) for op, points in tables.items()}
            for group, tables in data["links"].items()
        },
        copy_bytes_per_us=float(data["copy_bytes_per_us"]),
        group_size=data["group_size"],
        compute_stretch=float(data.get("compute_stretch", 1.0)),
    )
    check_problem(problem)
    return problem


def _node(i: int, data: JsonObject, file: str) -> Node:
    kind = data["kind"]
    of_launch: JsonObject = {"group": data.get("group", "")} if kind == "compute" else {}
    if kind == "launch":
        for key in _OF_LAUNCHES:
            if key not in data:
                raise PROBLEM.missing(file, ("nodes", i, key))
            of_launch[key] = data[key]
    return Node(
        name=str(data.get("name", i)),
        kind=kind,
        deps=tuple(data["deps"]),
        us=float(data["us"]),
        bytes=data["bytes"],
        alias=data.get("alias"),
        reduce=data.get("reduce"),
        launch=data.get("launch") if kind == "wait" else None,
        **of_launch,
    )
