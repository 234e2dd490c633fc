"""The user's own line among the frames that led to a break."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_PACKAGE_DIR = Path(__file__).resolve().parents[2]
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NOT_USER = (
    _TORCH,
    str(_PACKAGE_DIR) + os.sep,
    str(_PACKAGE_DIR.with_name("inductor_passes")) + os.sep,
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Its decorators wrap c10d functions, so that they stand between the user and torch.
_WRAPPERS = os.sep + "typing_extensions.py"


def user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """``file:line: code`` of the innermost user's frame, being traced or calling it; "" if none."""
    index = _innermost_user(stack)
    if index is not None:
        return line_of_frame(stack[index])
    callers = _callers()
    index = _innermost_user(callers)
    return line_of_frame(callers[index]) if index is not None else ""


def call_path(stack: Sequence[traceback.FrameSummary]) -> tuple[str, ...]:
    """``file: function: code`` of each traced frame from the innermost user's inwards."""
    start = _innermost_user(stack) or 0
    return tuple(
        f"{_short(frame.filename)}: {frame.name}: {frame.line or ''}" for frame in stack[start:]
    )


def line_of_frame(frame: traceback.FrameSummary) -> str:
    """``file:line: code``, in the form of the collectives' records."""
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"


def _short(filename: str) -> str:
    if filename.startswith(_TORCH):
        return "torch/" + filename.removeprefix(_TORCH).replace(os.sep, "/")
    return os.path.basename(filename)


def _callers() -> list[traceback.FrameSummary]:
    frames = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    return list(reversed(frames))


def _innermost_user(stack: Sequence[traceback.FrameSummary]) -> int | None:
    for index in range(len(stack) - 1, -1, -1):
        if _is_users(stack[index].filename):
            return index
    return None


def _is_users(filename: str) -> bool:
    if filename.startswith((*_NOT_USER, "<frozen")) or filename.endswith(_WRAPPERS):
        return False
    in_stdlib = filename.startswith(_STDLIB)
    return not in_stdlib or any(part in filename for part in _INSTALLED)
