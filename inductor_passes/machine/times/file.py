"""The file of a table of times, read so strictly that whatever is no such table counts as none."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

from inductor_passes.errors import TimesError
from inductor_passes.files import Form, checked, parsed, text_of
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime, Times, TunedStep

log = logging.getLogger(__name__)

VERSION = 2
_US = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 1}
_TEXT = {"type": "string"}
_NODE = {
    "operator": _TEXT,
    "us": _US,
    "predicted_us": _US,
    "dtype": _TEXT,
    "product": {"type": "array", "items": {"type": "integer", "minimum": 0}},
}
_LAUNCH = {
    "kind": _TEXT,
    "ranks": _COUNT,
    "nodes": _COUNT,
    "payload_bytes": {"type": "integer", "minimum": 0},
    "us": _US,
    "predicted_us": _US,
    "stretch": {"type": "number", "minimum": 1},
}


def _all(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _with_optional(optional: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    form = _all(properties)
    return {**form, "properties": {**properties, **optional}}


def _table_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _all(row)}


_GRAPH = _all(
    {"phase": _TEXT, "nodes": _table_of(_NODE), "launches": _table_of(_LAUNCH), "waited_us": _US}
)
_OUTCOME = _all(
    {
        "before_us": _US,
        "after_us": _US,
        "recompile_s": _US,
        "changes": {"type": "array", "items": _TEXT},
    }
)
FORM = Form(
    name="table of times",
    error=TimesError,
    fix="`dynamo_dist.tune(step)` writes one; remove the file to have none.",
    schema=_with_optional(
        {
            "outcome": _OUTCOME,
            "inter_stretch": {"type": "array", "items": {"type": "number", "minimum": 1}},
        },
        {
            "version": {"const": VERSION, "type": "integer"},
            "rows": {"type": "integer", "minimum": 1},
            "machine": _TEXT,
            "torch": _TEXT,
            "world": _COUNT,
            "steps": _COUNT,
            "graphs": {"type": "object", "additionalProperties": _GRAPH},
            "probes": {"type": "array", "items": _all(_LAUNCH)},
            "compute_stretch": {"type": "number", "minimum": 1},
            "launch_stretch": {"type": "number", "minimum": 1},
        },
    ),
)


def to_text(times: Times, outcome: TunedStep | None = None) -> str:
    """A table as JSON, and what it was good for."""
    content = dataclasses.asdict(times)
    del content["digest"]
    if times.inter_stretch is None:
        del content["inter_stretch"]
    if outcome is not None:
        content["outcome"] = dataclasses.asdict(outcome)
    return json.dumps({"version": VERSION, "rows": _rows(times), **content})


def outcome_of(text: str, file: str = "") -> TunedStep | None:
    """What the table of a text was good for; None where nobody wrote it. Raises TimesError."""
    data = checked(parsed(text, file, FORM), FORM, file).get("outcome")
    return None if data is None else TunedStep(**{**data, "changes": tuple(data["changes"])})


def of_text(text: str, file: str = "") -> Times:
    """Inverse of ``to_text``. Raises TimesError for anything else, NaN and lost rows among it."""
    data = checked(parsed(text, file, FORM), FORM, file)
    inter = tuple(data.get("inter_stretch", ()))
    if len(inter) not in (0, 2):
        raise FORM.not_this(file, f"has {len(inter)} factors in inter_stretch, not 2.")
    times = Times(
        machine=data["machine"],
        torch=data["torch"],
        world=data["world"],
        steps=data["steps"],
        graphs={name: _graph(entry) for name, entry in data["graphs"].items()},
        probes=tuple(LaunchTime(**_only(_LAUNCH, row)) for row in data["probes"]),
        compute_stretch=data["compute_stretch"],
        launch_stretch=data["launch_stretch"],
        inter_stretch=(inter[0], inter[1]) if inter else None,
    )
    if _rows(times) != data["rows"]:
        raise FORM.not_this(file, f"has {_rows(times)} rows, not the {data['rows']} that it says.")
    return times


def read(path: str | os.PathLike[str], *, torch: str, world: int) -> Times | None:
    """The table of a file that was measured under these; None, with one line in the log, for any other file.

    Whether it is of the graph and the machine is looked at where a graph is priced (``pipeline.cost_model``).
    """
    file = os.fspath(path)
    try:
        times = of_text(text_of(file, FORM), file)
    except TimesError as error:
        log.warning("Measured times are not used: %s", error)
        return None
    for what, theirs, ours in (
        ("torch", times.torch, torch),
        ("number of ranks", times.world, world),
    ):
        if theirs != ours:
            log.warning(
                "Measured times are not used: %r is of another %s (%s, and this is %s).",
                file, what, theirs, ours,
            )  # fmt: skip
            return None
    return times


def _rows(times: Times) -> int:
    of_graphs = sum(len(graph.nodes) + len(graph.launches) for graph in times.graphs.values())
    return of_graphs + len(times.probes)


def _graph(entry: dict[str, Any]) -> GraphTimes:
    nodes = {
        name: NodeTime(**{**_only(_NODE, row), "product": tuple(row["product"])})
        for name, row in entry["nodes"].items()
    }
    launches = {name: LaunchTime(**_only(_LAUNCH, row)) for name, row in entry["launches"].items()}
    return GraphTimes(entry["phase"], nodes, launches, entry["waited_us"])


def _only(names: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in names}
