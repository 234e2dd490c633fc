"""A file's text, plain or gzipped: no device, no pipe, and never more of it than its format allows."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path

from inductor_passes.files.form import MIB, Form

_GZIP = b"\x1f\x8b"
_GZIP_HEADER = 31  # zlib's number for "with gzip's header"
# gzip files may be joined end to end. Nobody joins many, and each costs time even if it is empty.
_MOST_MEMBERS = 64


def text_of(path: str | os.PathLike[str], form: Form, name: str = "") -> str:
    """The text of a file. Raises the form's error if it cannot be read, is too large, or is not text.

    ``name``: what messages call it; its path if left out.
    """
    file = name or os.fspath(path)
    try:
        data = _start_of(os.fspath(path), form.most_bytes + 1)
    except OSError as error:
        raise form.unreadable(file, error.strerror or str(error)) from None
    except ValueError as error:  # a path with a null byte
        raise form.unreadable(file, str(error)) from None
    if len(data) > form.most_bytes:
        raise form.unreadable(file, f"it has more than {form.most_bytes // MIB} MiB")
    if data[:2] == _GZIP:
        data = _inflated(data, file, form)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise form.unreadable(file, "it is not UTF-8 text") from None


def _start_of(file: str, size: int) -> bytes:
    kind = os.stat(file).st_mode
    # A pipe that nobody writes to and a device without end would be read for ever.
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    with Path(file).open("rb") as source:
        return source.read(size)


def _inflated(data: bytes, file: str, form: Form) -> bytes:
    parts: list[bytes] = []
    left = form.most_bytes + 1
    for _ in range(_MOST_MEMBERS):
        member = zlib.decompressobj(_GZIP_HEADER)
        try:
            parts.append(member.decompress(data, left))
        except zlib.error as error:
            raise form.unreadable(file, f"it is not whole gzip ({error})") from None
        left -= len(parts[-1])
        if left <= 0:
            raise form.unreadable(file, f"it has more than {form.most_bytes // MIB} MiB unpacked")
        if not member.eof:
            raise form.unreadable(file, "it is not whole gzip (its end is missing)")
        data = member.unused_data
        if not data.strip(b"\0"):  # gzip allows zeros at the end
            return b"".join(parts)
    raise form.unreadable(file, f"it is more than {_MOST_MEMBERS} gzip files in one")
