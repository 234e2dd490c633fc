"""JSON values of a text: what would take too much memory, nest too deeply or say a thing twice is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from typing import Any

from inductor_passes.files.check import checked
from inductor_passes.files.form import MIB, Form
from inductor_passes.files.text import text_of

_MOST_MEMORY = 640 * MIB
# Bytes that CPython takes for a small object, a list of one, and a value with its place in a list, rounded up.
_PER_OBJECT, _PER_LIST, _PER_VALUE = 200, 100, 40
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load(path: str | os.PathLike[str], form: Form) -> Any:
    """The values of a file, of the form's schema. Raises the form's error, one line."""
    file = os.fspath(path)
    return checked(parsed(text_of(file, form), file, form), form, file)


def parsed(text: str, file: str, form: Form) -> Any:
    """The values of a JSON text. Raises the form's error if it is none."""
    # Counted before anything is made; what stands in strings is counted too, so the bound is a generous one.
    memory = sys.getsizeof(text) + _PER_OBJECT * text.count("{") + _PER_LIST * text.count("[")
    if memory + _PER_VALUE * text.count(",") > _MOST_MEMORY:
        raise form.not_this(file, f"would take more than {_MOST_MEMORY // MIB} MiB of memory.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise form.not_this(file, f"has {twice!r} twice in one object.")
        return made

    try:
        value = json.loads(text, object_pairs_hook=unique if form.unique_keys else None)
        if _SURROGATE.search(text):  # half a character cannot be written anywhere
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"{error.msg} at line {error.lineno}, column {error.colno}."
        raise form.not_this(file, f"is not JSON: {place}") from None
    except RecursionError:
        raise form.not_this(file, "is nested too deeply.") from None
    except UnicodeEncodeError:
        raise form.not_this(file, "has half a character (a lone surrogate) in a string.") from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):
            digits = sys.get_int_max_str_digits()
            raise form.not_this(file, f"has a number of more than {digits} digits.") from None
        raise
    return value
