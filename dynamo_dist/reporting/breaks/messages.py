"""Dynamo's break messages, taken apart: kind, explanation, hints, developer's context.

The text has had one form from torch 2.13 to 2.15; what does not have it becomes an explanation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
