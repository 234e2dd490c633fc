"""From a node's recorded stack to the user's own line."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

# What in ``node.meta`` says why a collective is there; whoever traces the program notes it.
CAUSE = "dist_cause"
# The code is missing where nobody can read the file, as of a cell or of what exec() ran.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)'
    r'(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?'
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Folders of code that stands between torch and an operator, in the place of code of torch.
_libraries: set[str] = set()


def add_library(file: str) -> None:
    """Take no line of the package that ``file`` is the ``__init__.py`` of for a user's."""
    _libraries.add(os.path.dirname(os.path.abspath(file)) + os.sep)


def user_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost user's frame that made the node, or ""."""
    return innermost_user_frame(node.stack_trace or "")


def frames_of(node: fx.Node) -> list[re.Match[str]]:
    """The node's recorded stack, outermost first: ``file``, ``line``, ``function`` and ``code`` of each frame."""
    return list(_FRAME.finditer(node.stack_trace or ""))


def cause(node: fx.Node) -> str:
    """Return the note made while the program was traced, such as a DTensor's change of placement, or ""."""
    return str(node.meta.get(CAUSE, ""))


def innermost_user_frame(stack_trace: str) -> str:
    """The same for a formatted stack; without a user's frame, torch's innermost one."""
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    known = [frame for frame in frames if not frame["file"].startswith(tuple(_libraries))]
    own = [frame for frame in known if not frame["file"].startswith(_TORCH)]
    frame = (own or known or frames)[-1]
    code = (frame["code"] or "").strip()
    return f"{frame['file']}:{frame['line']}{code and f': {code}'}"
