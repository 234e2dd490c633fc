"""Read and write files that come from outside, and end soon whatever they contain.

``text_of`` reads a file, plain or gzipped, up to a size. ``parsed`` makes JSON values of it.
``checked`` compares these with a schema. ``load`` does all three. An error is one line: file,
field, value, fix.

Stricter than the standard in numbers: 1.0 is no integer, NaN and infinity are no numbers, and
nothing counts beyond ``MOST``.

A record is some tens of kilobytes for a graph, and a job that recompiles for weeks makes many. One
that is gone costs a warm start its report and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import io
import json
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Schema = Mapping[str, Any]
# An object as JSON has it; a schema, or its reader, knows what is in it.
JsonObject = dict[str, Any]
MIB = 2**20
_SHOWN = 57


@dataclass(frozen=True, slots=True)
class Form:
    """One format.

    ``name``: in messages, such as ``schedule problem``. ``error``: makes the error of a what, a why
        and a fix.
    ``fix``: what to do about any file that is none. ``schema``: JSON schema. ``most_bytes``: of the
        file, and of what it holds unpacked.
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

    def missing(self, file: str, path: Sequence[str | int]) -> Exception:
        """The error for a field that is not there."""
        what = f"{self._whose(file)} lacks the field {field(path)!r}."
        return self.error(what, "", f"Add it. {self.fix}")

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


_GZIP = b"\x1f\x8b"


def text_of(path: str | os.PathLike[str], form: Form, name: str = "") -> str:
    """The text of a file. Raises the form's error if it cannot be read, is too large, or is not
    text.

    ``name``: what messages call it; its path if left out.
    """
    file = name or os.fspath(path)
    try:
        data = _start_of(path, form.most_bytes + 1)
    except OSError as error:
        raise form.unreadable(file, error.strerror or str(error)) from None
    except ValueError as error:  # half a gzip file, a path with a null byte
        raise form.unreadable(file, str(error)) from None
    if len(data) > form.most_bytes:
        raise form.unreadable(file, f"it has more than {form.most_bytes // MIB} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise form.unreadable(file, "it is not UTF-8 text") from None


def _start_of(path: str | os.PathLike[str], size: int) -> bytes:
    """The first bytes of a file, or of what is packed in it."""
    with Path(path).open("rb") as source:
        data = source.read(size)
    if data[:2] == _GZIP and len(data) < size:
        try:
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"it is not whole gzip ({error})") from None
    return data


# Microseconds: 30,000 years. Bytes: an exabyte. Sums and products of such are still finite as
# floats.
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
    """The standard, with our idea of a number. Imported when a file is read, which is seldom: it
    takes a while.
    """
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


TEMPORARY = ".unfinished."


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``, whose folder is made. Raises OSError, and leaves what was
    there as it was.
    """
    target = os.path.abspath(path)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix=TEMPORARY)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


MOST_FILES = 4096
MOST_BYTES = 256 * 2**20
# A process that died while it wrote left its file; one that lives needs less than this.
_UNFINISHED_S = 3600.0
# Listing the folder costs a millisecond a thousand files: not for each record.
_EVERY = 64

_stored = 0


def put(folder: str, name: str, text: str) -> None:
    """Write a record whole, and now and then trim the folder. Raises OSError if it cannot be
    written.
    """
    global _stored  # noqa: PLW0603 - when to look again, of this process alone
    write_whole(os.path.join(folder, name), text)
    if _stored % _EVERY == 0:
        trim(folder)
    _stored += 1


def trim(folder: str, most_files: int | None = None, most_bytes: int | None = None) -> None:
    """Remove the oldest records above the caps, and what dead processes left half written."""
    most_files = MOST_FILES if most_files is None else most_files
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes
    now, files, size = time.time(), 0, 0
    for written, length, path in sorted(_files(folder), reverse=True):
        files, size = files + 1, size + length
        is_left = os.path.basename(path).startswith(TEMPORARY) and now - written > _UNFINISHED_S
        if is_left or files > most_files or size > most_bytes:
            with contextlib.suppress(OSError):  # another process was faster
                os.unlink(path)


def _files(folder: str) -> Iterator[tuple[float, int, str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, status.st_size, entry.path


__all__ = ["Form", "Schema", "checked", "load", "parsed", "text_of"]
