"""Folders that this user owns and nobody else can write, and files in them.

Artefacts are pickles and machine code: who can write one runs what they like in whoever loads it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dynamo_dist.errors import ArtefactError
from inductor_passes.files.whole import TEMPORARY

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WHY = "Artefacts are pickles and machine code: who can write them runs code in this process."


class Folder:
    """A folder that is open and was found to be this user's alone. What it reads is too, each file by itself."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def names(self) -> list[str]:
        """Return the names of what lies in it."""
        return sorted(os.listdir(self._descriptor))

    def read(self, name: str) -> bytes:
        """Return what a file holds. Raises FileNotFoundError, and ArtefactError if it is not this user's alone or no file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        where = os.path.join(self.path, name)
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(where, error) from None
        with os.fdopen(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ArtefactError(f"{where} is no file.", "", "Save the artefacts again.")
            _check(where, state)
            try:
                return file.read()
            except OSError as error:
                raise unreadable(where, error) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all. Raises ArtefactError, and leaves what was there as it was."""
        try:
            write_whole(os.path.join(self.path, name), content)
        except OSError as error:
            raise ArtefactError(
                f"Cannot write {os.path.join(self.path, name)!r}: {error.strerror or error}.",
                "What this rank has saved there before is as it was.",
                "Make room, or save to another folder.",
            ) from None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], make: bool = False) -> Iterator[Folder]:
    """Open a folder, or ``make`` it. Raises ArtefactError if it is not there, or not this user's alone."""
    where = os.path.abspath(os.fspath(path))
    if not hasattr(os, "geteuid"):
        raise ArtefactError(
            "Artefacts cannot be saved or loaded on this system.",
            "It does not say who owns a file.",
        )
    try:
        if make:
            os.makedirs(os.path.dirname(where), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(where, 0o700)
        descriptor = os.open(os.path.realpath(where), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArtefactError(
            f"There is no folder {where!r}.",
            "",
            "Give the folder that dynamo_dist.save(path) wrote.",
        ) from None
    except (OSError, ValueError) as error:
        raise unreadable(where, error) from None
    try:
        _check(where, os.fstat(descriptor))
        yield Folder(where, descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, content: bytes) -> None:
    """Write ``content`` to ``path``, readable by this user alone. Raises OSError, and leaves what was there as it was."""
    folder, name = os.path.split(path)
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f"{TEMPORARY}{name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(unfinished).unlink()
        raise


def unreadable(where: str, error: Exception) -> ArtefactError:
    """The error for a file or folder that cannot be opened or read."""
    why = getattr(error, "strerror", None) or str(error)
    return ArtefactError(
        f"Cannot read {where!r}: {why}.", "", "Correct the path or its permissions."
    )


def _check(where: str, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise ArtefactError(
            f"{where!r} belongs to user {state.st_uid}, and this process to user {os.geteuid()}.",
            _WHY,
            "Copy it as this user, if you trust where it is from.",
        )
    if state.st_mode & _OTHERS_WRITE:
        raise ArtefactError(
            f"{where!r} can be written by others (mode {stat.S_IMODE(state.st_mode):o}).",
            _WHY,
            f"If nobody else has: chmod go-w {where}",
        )
