"""JSON values of a file, of a format's schema."""

from __future__ import annotations

import json
import os
from typing import Any

from inductor_passes.files.check import checked
from inductor_passes.files.form import Form
from inductor_passes.files.text import text_of


def load(path: str | os.PathLike[str], form: Form) -> Any:
    """The values of a file, of the form's schema. Raises the form's error, one line."""
    file = os.fspath(path)
    return checked(parsed(text_of(file, form), file, form), form, file)


def parsed(text: str, file: str, form: Form) -> Any:
    """The values of a JSON text. Raises the form's error if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{error.msg} at line {error.lineno}, column {error.colno}."
        raise form.not_this(file, f"is not JSON: {place}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of many digits
        raise form.not_this(file, f"is not JSON that Python reads: {error}.") from None
