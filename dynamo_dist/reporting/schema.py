"""The JSON schema of reports, made from the records: what they hold is what it says.

``python -m dynamo_dist explain --schema`` prints it; ``docs/report.schema.json`` is a copy.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from dynamo_dist.reporting import records
from inductor_passes import records as graph_records
from inductor_passes.report.figures import SCHEMA_VERSION

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_VERSIONS = {
    records.RunReport: SCHEMA_VERSION,
    graph_records.GraphRecord: graph_records.SCHEMA_VERSION,
}
# What came to a record later is what has a default; but of these everything has one.
_LATER: dict[type, set[str]] = {records.RunReport: {*records.PARTS} - {"graphs"}}


def json_schema() -> dict[str, Any]:
    """The schema of what ``explain --json`` prints: all ranks of a run, merged.

    One rank's ``report.json`` is ``#/$defs/RunReport``.
    """
    definitions: dict[str, Any] = {}
    report = _reference(records.RunReport, definitions)
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


def schema_of_rank() -> dict[str, Any]:
    """Return the schema that a reader asks of one rank's report: what later versions added may be missing."""
    definitions: dict[str, Any] = {}
    return {
        **_reference(records.RunReport, definitions, is_read=True),
        "$defs": definitions,
    }


def _reference(cls: type, definitions: dict[str, Any], is_read: bool = False) -> dict[str, Any]:
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


def _has_default(field: dataclasses.Field[Any]) -> bool:
    given = (field.default, field.default_factory)
    return not field.init or given != (dataclasses.MISSING, dataclasses.MISSING)


def _of(hint: Any, definitions: dict[str, Any], is_read: bool) -> dict[str, Any]:
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


def _object(properties: dict[str, Any], description: str = "") -> dict[str, Any]:
    """Every field is there; a reader ignores others, which later versions may add."""
    described = {"description": description} if description else {}
    return {**described, "type": "object", "properties": properties, "required": [*properties]}
