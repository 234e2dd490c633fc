"""JSON values against a JSON schema, by the library of the standard.

Stricter than the standard in numbers: 1.0 is no integer, NaN and infinity are no numbers, and nothing counts beyond ``MOST``.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Sequence
from typing import Any

from inductor_passes.files.form import Form

# Microseconds: 30,000 years. Bytes: an exabyte. Sums and products of such are still finite as floats.
MOST = 10**18


def checked(value: Any, form: Form, file: str = "", at: Sequence[str | int] = ()) -> Any:
    """The value itself, if it is of the form's schema. Raises the form's error for one fault.

    ``file`` is "" for what is not from a file; ``at`` is where in it the value stands.
    """
    if form.schema is None:
        return value
    found = importlib.import_module("jsonschema.exceptions").best_match(
        _validator()(form.schema).iter_errors(value)
    )
    if found is None:
        return value
    path, wanted = [*at, *found.absolute_path], found.validator_value
    if found.validator == "required":
        lacking = next(key for key in wanted if key not in found.instance)
        raise form.missing(file, [*path, lacking])
    if found.validator == "additionalProperties":
        known = found.schema["properties"]
        unknown = next(key for key in found.instance if key not in known)
        rule = f"must not be there; known are {', '.join(known)}"
        raise form.wrong(file, [*path, unknown], found.instance[unknown], rule)
    raise form.wrong(
        file, path, found.instance, f"must have {found.validator} {json.dumps(wanted)}"
    )


@functools.cache
def _validator() -> Any:
    """The standard, with our idea of a number. Imported when a file is read, which is seldom: it takes a while."""
    draft = importlib.import_module("jsonschema").Draft202012Validator
    types = draft.TYPE_CHECKER.redefine_many({"integer": _is_integer, "number": _is_number})
    extend = importlib.import_module("jsonschema.validators").extend
    return extend(draft, type_checker=types)


def _is_integer(_: object, value: object) -> bool:
    return type(value) is int and abs(value) <= MOST


def _is_number(_: object, value: object) -> bool:
    return _is_integer(_, value) or (
        type(value) is float and math.isfinite(value) and abs(value) <= MOST
    )
