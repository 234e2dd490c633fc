"""From a node's recorded stack to the user's own line."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

# What in ``node.meta["custom"]`` says why a collective is there; whoever traces the program notes it.
CAUSE = "dist_cause"
CAUSE_IN_BACKWARD = "dist_cause_in_backward"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
_TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost frame outside torch that made the node, or ""."""
    return innermost_user_frame(node.stack_trace or "")


def cause(node: fx.Node) -> str:
    """What was noted while the program was traced, such as a DTensor's change of placement, or ""."""
    noted = node.meta.get("custom") or {}
    if str(node.meta.get("partitioner_tag", "")).endswith("backward"):
        # Up to torch 2.12 a node's own note is lost there, and what it has is its forward's.
        return str(noted.get(CAUSE_IN_BACKWARD, ""))
    return str(noted.get(CAUSE, ""))


def innermost_user_frame(stack_trace: str) -> str:
    """The same for a formatted stack; a stack wholly inside torch gives its innermost frame."""
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    own = [frame for frame in frames if not frame["file"].startswith(_TORCH_DIR)]
    frame = (own or frames)[-1]
    return f"{frame['file']}:{frame['line']}: {frame['code'].strip()}"
