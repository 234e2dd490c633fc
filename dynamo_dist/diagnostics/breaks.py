"""Causes of a program's graph breaks: Dynamo's messages taken apart, the user's line, and advice.

The causes are data (``CATALOG``) and the first that matches wins. To add causes of one's own, put
them in front: ``collect(catalog=(*MINE, *CATALOG))``. A break that no cause fits keeps Dynamo's
words.

The text has had one form from torch 2.13 to 2.15; what does not have it becomes an explanation.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch

from dynamo_dist.diagnostics.break_causes import CATALOG
from dynamo_dist.diagnostics.own_break_causes import Cause

_CHAIN = "*** While handling this graph break, another graph break occurred: ***"
_LINK = re.compile(r"\n\s*For more details about this graph break, please visit: \S+")
_CONTEXT = re.compile(r"\n\s*Developer debug context: ?")
_HINT = re.compile(r"\n\s*Hint: ?")
_EXPLANATION = re.compile(r"\n\s*Explanation: ?")
_USER_CODE = re.compile(r"\n\s*(?:from user code:|Set TORCHDYNAMO_VERBOSE|The above exception)")
_ERROR_NAME = re.compile(r"^(?:[A-Za-z_]\w*(?:Error|Exception): )+")
# Addresses differ from run to run and rank to rank; without them equal breaks are equal.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class BreakMessage:
    """One message. ``kind`` is its first line, without the exception's name."""

    kind: str
    explanation: str
    hints: tuple[str, ...] = ()
    context: str = ""


def parse(text: str) -> tuple[BreakMessage, ...]:
    """The messages of a chain, the first cause first; at least one."""
    return tuple(_parse_one(part) for part in text.split(_CHAIN))


def without_addresses(text: str) -> str:
    """``text`` without the addresses in the ``repr`` of objects."""
    return _ADDRESS.sub("", text)


def _parse_one(text: str) -> BreakMessage:
    text = _USER_CODE.split(_LINK.sub("", without_addresses(text)), maxsplit=1)[0]
    head, _, context = _cut(_CONTEXT, text)
    head, *hints = _HINT.split(head)
    kind, _, explanation = _cut(_EXPLANATION, head)
    kind = _ERROR_NAME.sub("", kind.strip())
    first, *rest = kind.splitlines() or [""]
    return BreakMessage(
        kind=first.strip(),
        explanation=_dedent(explanation) or _dedent("\n".join(rest)) or first.strip(),
        hints=tuple(_dedent(hint) for hint in hints),
        context=_dedent(context),
    )


def _cut(pattern: re.Pattern[str], text: str) -> tuple[str, str, str]:
    match = pattern.search(text)
    if match is None:
        return text, "", ""
    return text[: match.start()], match[0], text[match.end() :]


def _dedent(text: str) -> str:
    """Strip the indentation that torch adds to every line but the first."""
    return "\n".join(re.sub(r"^ {1,6}", "", line) for line in text.strip().splitlines())


_PACKAGE_DIR = Path(__file__).resolve().parents[1]
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


__all__ = ["CATALOG", "Advice", "Cause", "advise"]


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice that a report gives about one break. ``cause`` is "" if no entry of the catalog
    matched.
    """

    cause: str
    why: str
    fix: str


def advise(
    message: BreakMessage, calls: Sequence[str] = (), catalog: Sequence[Cause] = CATALOG
) -> Advice:
    """Explain why this break happens and what to write instead.

    ``calls`` are lines ``file: function: code`` from the user's line inwards.
    """
    detail = f"{message.context}\n{message.kind}\n{message.explanation}"
    path = "\n".join(calls)
    for cause in catalog:
        groups = _match(cause, message.kind, detail, path)
        if groups is not None:
            fix = Template(cause.fix).safe_substitute(groups)
            return Advice(
                cause=cause.name,
                why=Template(cause.why).safe_substitute(groups),
                fix=fix or _hints_as_comments(message.hints),
            )
    return Advice(cause="", why=message.explanation, fix=_hints_as_comments(message.hints))


def _match(cause: Cause, kind: str, detail: str, calls: str) -> dict[str, str] | None:
    groups: dict[str, str] = {}
    for pattern, text in ((cause.kind, kind), (cause.detail, detail), (cause.calls, calls)):
        if not pattern:
            continue
        match = re.search(pattern, text)
        if match is None:
            return None
        groups.update({k: v for k, v in match.groupdict().items() if v is not None})
    return groups


def _hints_as_comments(hints: Sequence[str]) -> str:
    return "\n".join(f"# {line}" for hint in hints for line in hint.splitlines())
