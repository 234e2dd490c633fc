"""Files written whole or not at all: a reader never sees half of one, and a full disk keeps no remains."""

from __future__ import annotations

import contextlib
import os
import tempfile

TEMPORARY = ".unfinished."


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``, whose folder is made. Raises OSError, and leaves what was there as it was."""
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
