"""A file's text, plain or gzipped, and never more of it than its format allows."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path

from inductor_passes.files.form import MIB, Form

_GZIP = b"\x1f\x8b"


def text_of(path: str | os.PathLike[str], form: Form, name: str = "") -> str:
    """The text of a file. Raises the form's error if it cannot be read, is too large, or is not text.

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
