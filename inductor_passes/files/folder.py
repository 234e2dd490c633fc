"""The folder of graph records, kept small: what was written longest ago goes first.

A record is some tens of kilobytes for a graph, and a job that recompiles for weeks makes many. One that is gone costs a
warm start its report and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from inductor_passes.files.whole import TEMPORARY, write_whole

MOST_FILES = 4096
MOST_BYTES = 256 * 2**20
# A process that died while it wrote left its file; one that lives needs less than this.
_UNFINISHED_S = 3600.0
# Listing the folder costs a millisecond a thousand files: not for each record.
_EVERY = 64

_stored = 0


def put(folder: str, name: str, text: str) -> None:
    """Write a record whole, and now and then trim the folder. Raises OSError if it cannot be written."""
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
