"""A format of files: its name, its schema, its limits, and how its errors are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
MIB = 2**20
_SHOWN = 57


@dataclass(frozen=True, slots=True)
class Form:
    """One format.

    ``name``: in messages, such as ``schedule problem``. ``error``: makes the error of a what, a why and a fix.
    ``fix``: what to do about any file that is none. ``schema``: JSON schema. ``most_bytes``: of the file, and of what it holds unpacked.
    """

    name: str
    error: Callable[[str, str, str], Exception]
    fix: str
    schema: Schema | None = None
    most_bytes: int = 64 * MIB

    def unreadable(self, file: str, why: str) -> Exception:
        """The error for a file whose content cannot be had."""
        return self.error(f"Cannot read {self.name} {file!r}:", f"{why}.", self.fix)

    def not_this(self, file: str, why: str) -> Exception:
        """The error for content that is not of this format as a whole."""
        return self.error(f"{self._whose(file)} {why}", "", f"Correct the file. {self.fix}")

    def wrong(self, file: str, path: Sequence[str | int], value: object, rule: str) -> Exception:
        """The error for one field."""
        where = f"field {field(path)!r}" if path else "the whole file"
        what = f"{self._whose(file)}: {where} is {shown(value)}, but it {rule}."
        return self.error(what, "", f"Correct the file. {self.fix}")

    def missing(self, file: str, path: Sequence[str | int], why: str = "") -> Exception:
        """The error for a field that is not there."""
        what = f"{self._whose(file)} lacks the field {field(path)!r}."
        return self.error(what, why, f"Add it. {self.fix}")

    def _whose(self, file: str) -> str:
        return (
            f"{self.name[0].upper()}{self.name[1:]} file {file!r}" if file else f"The {self.name}"
        )


def field(path: Sequence[str | int]) -> str:
    """A place in a file as text: ``nodes[3].deps[0]``."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return "".join(parts).removeprefix(".")


def shown(value: object) -> str:
    """A value in a message: never a second line, and never much of it."""
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields" if value else "an empty object"
    if type(value) is int and value.bit_length() > 128:  # Python may refuse to write it in digits
        return f"a number of some {int(value.bit_length() * 0.30103) + 1} digits"
    text = json.dumps(value) if isinstance(value, (str, int, float, type(None))) else repr(value)
    return text if len(text) <= _SHOWN + 3 else f"{text[:_SHOWN]}..."
