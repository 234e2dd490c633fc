"""JSON values against a JSON schema, up to the first fault.

The keywords: ``$ref`` to ``#/$defs/NAME``, ``anyOf``, ``const``, ``enum``, ``type``, ``properties``, ``required``,
``additionalProperties``, ``items``, ``minItems``, ``maxItems``, ``minimum``, ``exclusiveMinimum``, ``maximum``;
``description``, ``title``, ``$schema`` and ``$defs`` say nothing of a value. Stricter than the standard
in numbers: 1.0 is no integer, NaN and infinity are no numbers, and nothing counts beyond ``MOST``.

Why not the library jsonschema: it takes a second for a report of 1.5 MB, this a tenth. A test holds the two
against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.files.form import Form, Schema, shown

# Microseconds: 30,000 years. Bytes: an exabyte. Sums and products of such are still finite as floats.
MOST = 10**18
_NOTHING: Mapping[str, Any] = {}
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "string": (lambda v: type(v) is str, "a string"),
    "integer": (lambda v: type(v) is int, "a whole number"),
    "number": (lambda v: type(v) is int or (type(v) is float and math.isfinite(v)), "a number"),
    "boolean": (lambda v: type(v) is bool, "true or false"),
    "null": (lambda v: v is None, "null"),
    "array": (lambda v: type(v) is list, "a list"),
    "object": (lambda v: type(v) is dict, "an object"),
}


@dataclass(slots=True)
class _Fault:
    """``path`` is from the inside out. ``rule``: None where the field is not there."""

    value: object
    rule: str | None
    path: list[str | int] = field(default_factory=list)

    def at(self, key: str | int) -> _Fault:
        self.path.append(key)
        return self


def checked(value: Any, form: Form, file: str = "", at: Sequence[str | int] = ()) -> Any:
    """The value itself, if it is of the form's schema. Raises the form's error for the first fault.

    ``file`` is "" for what is not from a file; ``at`` is where in it the value stands.
    """
    if form.schema is not None:
        found = _fault(value, form.schema, form.schema.get("$defs", _NOTHING))
        if found is not None:
            path = [*at, *reversed(found.path)]
            if found.rule is None:
                raise form.missing(file, path)
            raise form.wrong(file, path, found.value, found.rule)
    return value


def _fault(value: Any, schema: Schema, definitions: Mapping[str, Schema]) -> _Fault | None:
    if "$ref" in schema:  # what stands beside it says nothing of a value
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        faults = [_fault(value, option, definitions) for option in schema["anyOf"]]
        if None in faults:
            return None
        # The option that went furthest is the one that was meant; none went anywhere: name them all.
        furthest = max((f for f in faults if f is not None), key=lambda f: len(f.path))
        return furthest if furthest.path else _Fault(value, f"must be {_kinds(schema)}")
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and not any(type(a) is type(value) and a == value for a in allowed):
        return _Fault(value, f"must be {' or '.join(map(shown, allowed))}")
    kind = schema.get("type")
    if kind is None:
        return None
    if not _TYPES[kind][0](value):
        return _Fault(value, f"must be {_kinds(schema)}")
    if kind == "object":
        return _fault_of_object(value, schema, definitions)
    if kind == "array":
        return _fault_of_array(value, schema, definitions)
    if kind in ("integer", "number"):
        return _fault_of_number(value, schema)
    return None


def _fault_of_object(
    value: dict[str, Any], schema: Schema, definitions: Mapping[str, Schema]
) -> _Fault | None:
    properties = schema.get("properties", _NOTHING)
    for name, inner in properties.items():
        if name in value:
            found = _fault(value[name], inner, definitions)
            if found is not None:
                return found.at(name)
    for name in schema.get("required", ()):
        if name not in value:
            return _Fault(None, None).at(name)
    others = schema.get("additionalProperties")
    if others is not None:
        for name, inner in value.items():
            found = None if name in properties else _fault(inner, others, definitions)
            if found is not None:
                return found.at(name)
    return None


def _fault_of_array(
    value: list[Any], schema: Schema, definitions: Mapping[str, Schema]
) -> _Fault | None:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        bound = least if len(value) < least else most
        how = "exactly" if least == most else "at least" if bound == least else "at most"
        return _Fault(value, f"must have {how} {bound} entries")
    inner = schema.get("items")
    if inner is not None:
        for place, item in enumerate(value):
            found = _fault(item, inner, definitions)
            if found is not None:
                return found.at(place)
    return None


def _fault_of_number(value: float, schema: Schema) -> _Fault | None:
    above = schema.get("exclusiveMinimum", -math.inf)
    least, most = schema.get("minimum", -MOST), schema.get("maximum", MOST)
    if above < value and least <= value <= most:
        return None
    if value > most:
        return _Fault(value, f"must be {_kinds(schema)} of at most {most:g}")
    bound = f"above {above:g}" if value <= above else f"of at least {least:g}"
    return _Fault(value, f"must be {_kinds(schema)} {bound}")


def _kinds(schema: Schema) -> str:
    """The types that a schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kinds, schema["anyOf"])))
    return _TYPES[schema["type"]][1] if "type" in schema else "an object"
