"""The record of one run as plain data, its JSON schema, and records read from disk.

JSON schema, version 1 (``RunReport.to_json``). Times are microseconds, sizes bytes; every list
keeps the order in which things were seen. A reader ignores fields it does not know; the version
rises when a field changes its meaning or goes.

    schema           1
    rank, world_size ints
    torch_version, plugin_version, topology   strings; topology is "" where no graph was costed
    graphs           list of graph records, each with a "schema" of its own
                     (inductor_passes.records.GraphRecord.to_json)
    breaks           list of {kind, reason, user_line, explanation, fix, cause, effect, count,
                     hints}
    recompiles       list of {function, user_line, guard, count}
    plans            list of {graph, method, steps, upstream_us, planned_us, bound_us, changes};
                     changes is a list of {op, upstream, planned}: where upstream and the plan put
                     an operation's inputs
    facts            list of {name, value, unit, source}; value is a number, a string or a list of
                     numbers, source says where it comes from: "simulated on h100x8",
                     "measured, CPU", "emulated link, 1 Gbit/s"

``python -m dynamo_dist explain --schema`` prints it; ``docs/report.schema.json`` is a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dynamo_dist.errors import ReportError
from inductor_passes import records as graph_records
from inductor_passes.files import Form, checked, load
from inductor_passes.records import GraphRecord, restored
from inductor_passes.report.figures import SCHEMA_VERSION, GraphsReport

Effect = Literal["split", "eager", "error"]


@dataclass(frozen=True, slots=True)
class BreakRecord:
    """One place where Dynamo could not go on, and how often it met it.

    ``kind`` is Dynamo's fixed name of the break and ``reason`` what it said about this one;
    ``explanation`` and ``fix`` (code, or advice as comments) come from ``catalog``, whose entry
    ``cause`` names; ``cause`` is "" where Dynamo's own words had to do. ``user_line`` is
    ``file:line: code``. ``effect``: ``split`` in two graphs, ``eager`` for the rest of the function
    or all of it, or ``error``: the compile failed.
    """

    kind: str
    reason: str
    user_line: str
    explanation: str
    fix: str
    cause: str = ""
    effect: Effect = "split"
    count: int = 1
    hints: tuple[str, ...] = ()

    @property
    def key(self) -> object:
        """Which break this is."""
        return self.kind, self.reason, self.user_line


@dataclass(frozen=True, slots=True)
class RecompileRecord:
    """A function that was compiled again, and the first guard that failed."""

    function: str
    user_line: str
    guard: str
    count: int = 1

    @property
    def key(self) -> object:
        """Which recompile this is."""
        return self.function, self.user_line, self.guard


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One operation whose inputs the plan puts elsewhere than upstream would: ``S0``, ``R``,
    ``P`` per input.
    """

    op: str
    upstream: tuple[str, ...]
    planned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The placements of one Dynamo graph, re-solved; ``graph`` is its name in a plan file.

    Times are modelled, communication and compute, in microseconds; no plan takes less than
    ``bound_us``.
    ``source``: the file that it was read from, the user's or one beside the cache; "" where it was
        made anew.
    """

    graph: str
    method: str
    steps: int
    upstream_us: float
    planned_us: float
    bound_us: float
    changes: tuple[PlannedStep, ...] = ()
    source: str = ""

    @property
    def key(self) -> object:
        """Which plan this is."""
        return self.graph


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that somebody measured or computed. ``source`` says how, in the reader's words."""

    name: str
    value: float | str | tuple[float, ...]
    unit: str = ""
    source: str = ""

    @property
    def key(self) -> object:
        """Which figure this is."""
        return self.name


Part = GraphRecord | BreakRecord | RecompileRecord | PlanRecord | Fact
# Field of a report that has several -> what they are.
PARTS: dict[str, type[Part]] = {
    "graphs": GraphRecord,
    "breaks": BreakRecord,
    "recompiles": RecompileRecord,
    "plans": PlanRecord,
    "facts": Fact,
}


@dataclass(frozen=True, slots=True)
class RunReport(GraphsReport):
    """One rank's run. The module's docstring documents its JSON."""

    breaks: tuple[BreakRecord, ...] = ()
    recompiles: tuple[RecompileRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    facts: tuple[Fact, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunReport:
        """Inverse of ``to_json``. Raises ValueError for another schema version or a missing
        field.
        """
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"This report has schema {data.get('schema')}, but this version reads schema "
                f"{SCHEMA_VERSION}. Write the report anew, or read it with the version that wrote "
                "it."
            )
        try:
            needed = {f.name: data[f.name] for f in dataclasses.fields(GraphsReport)}
            needed["graphs"] = tuple(map(GraphRecord.from_json, needed["graphs"]))
            report: RunReport = restored(cls, {**data, "graphs": ()})
            if "breaks" not in data:
                off = Fact("graph breaks", "not looked at: this plugin was off")
                needed["facts"] = (*report.facts, off)
            return dataclasses.replace(report, **needed)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"This report cannot be read: {type(error).__name__}: {error}. Its schema version "
                "is right but a field is missing or has another type; write the report anew."
            ) from error


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_VERSIONS = {
    RunReport: SCHEMA_VERSION,
    graph_records.GraphRecord: graph_records.SCHEMA_VERSION,
}
# What came to a record later is what has a default; but of these everything has one.
_LATER: dict[type, set[str]] = {RunReport: {*PARTS} - {"graphs"}}


def json_schema() -> dict[str, object]:
    """The schema of what ``explain --json`` prints: all ranks of a run, merged.

    One rank's ``report.json`` is ``#/$defs/RunReport``.
    """
    definitions: dict[str, object] = {}
    report = _reference(RunReport, definitions)
    ranks = {"type": "array", "items": {"type": "integer"}}
    value = _object({"value": {"type": "string"}, "ranks": ranks})
    difference = _object(
        {"what": {"type": "string"}, "values": {"type": "array", "items": value}},
        "Something on which ranks disagree: each value with the ranks that have it.",
    )
    merged = _object(
        {
            "schema": {"const": SCHEMA_VERSION},
            "world_size": {"type": "integer"},
            "missing": ranks,
            "differences": {"type": "array", "items": difference},
            "reports": {"type": "array", "items": report, "minItems": 1},
        },
        "Reports of the ranks of one run, by rank. missing: ranks that gave none.",
    )
    return {"$schema": DIALECT, "title": "dynamo_dist report", **merged, "$defs": definitions}


def schema_of_rank() -> dict[str, object]:
    """Return the schema that a reader asks of one rank's report: what later versions added may
    be missing.
    """
    definitions: dict[str, object] = {}
    return {
        **_reference(RunReport, definitions, is_read=True),
        "$defs": definitions,
    }


def _reference(
    cls: type, definitions: dict[str, object], is_read: bool = False
) -> dict[str, object]:
    name = cls.__name__
    if name not in definitions:
        definitions[name] = {}  # taken, should it name itself
        hints = typing.get_type_hints(cls)
        given = {f.name: f for f in dataclasses.fields(cls)}
        fields = {
            key: {**_of(hints[key], definitions, is_read), **f.metadata} for key, f in given.items()
        }
        if cls in _VERSIONS:
            fields = {"schema": {"const": _VERSIONS[cls]}, **fields}
        made = _object(fields, " ".join((cls.__doc__ or "").split()))
        if is_read:
            later = _LATER.get(cls, {f.name for f in given.values() if _has_default(f)})
            made["required"] = [key for key in fields if key not in later]
        definitions[name] = made
    return {"$ref": f"#/$defs/{name}"}


def _has_default(field: dataclasses.Field[object]) -> bool:
    given = (field.default, field.default_factory)
    return not field.init or given != (dataclasses.MISSING, dataclasses.MISSING)


def _of(hint: object, definitions: dict[str, object], is_read: bool) -> dict[str, object]:
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if dataclasses.is_dataclass(hint):
        return _reference(typing.cast(type, hint), definitions, is_read)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[-1] is not ...:
        # Of one length; every entry is of the first's type.
        size = len(arguments)
        items = _of(arguments[0], definitions, is_read)
        return {"type": "array", "items": items, "minItems": size, "maxItems": size}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0], definitions, is_read)}
    if origin is dict:
        inner = _of(arguments[1], definitions, is_read)
        return {"type": "object", "additionalProperties": inner}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(argument, definitions, is_read) for argument in arguments]}
    raise TypeError(f"A record has a field of type {hint}, which the schema cannot express.")


def _object(properties: Mapping[str, object], description: str = "") -> dict[str, object]:
    """Every field is there; a reader ignores others, which later versions may add."""
    described = {"description": description} if description else {}
    return {**described, "type": "object", "properties": properties, "required": [*properties]}


_FORM = Form(
    name="report",
    error=ReportError,
    fix="Pass a report.json that write_report() wrote, or what explain --json printed.",
)


def read_report(path: str | os.PathLike[str]) -> RunReport:
    """Read a ``report.json`` of one rank back. Raises ReportError, a ValueError, if it is none."""
    return _report(load(path, _FORM), os.fspath(path), ())


def read_reports(path: str | os.PathLike[str]) -> list[RunReport]:
    """The ranks of a ``report.json``, or of a merged report such as ``explain --json`` prints."""
    data, file = load(path, _FORM), os.fspath(path)
    if not isinstance(data, dict) or "reports" not in data:
        return [_report(data, file, ())]
    if not isinstance(data["reports"], list):
        raise _FORM.wrong(file, ("reports",), data["reports"], "must be a list")
    return [_report(item, file, ("reports", i)) for i, item in enumerate(data["reports"])]


def _report(data: object, file: str, at: tuple[str | int, ...]) -> RunReport:
    version = data.get("schema") if isinstance(data, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        raise ReportError(
            f"{file!r} has schema {version}, but this version reads schema {SCHEMA_VERSION}.",
            "",
            "Write the report anew, or read it with the version that wrote it.",
        )
    return RunReport.from_json(checked(data, _form(), file, at))


@functools.cache
def _form() -> Form:
    return dataclasses.replace(_FORM, schema=schema_of_rank())
