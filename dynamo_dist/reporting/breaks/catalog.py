"""Causes of a program's graph breaks, and what to write instead: from Dynamo's message to advice.

The causes are data (``CATALOG``) and the first that matches wins. To add causes of one's own, put
them in front: ``collect(catalog=(*MINE, *CATALOG))``. A break that no cause fits keeps Dynamo's words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from dynamo_dist.reporting.breaks.cause import Cause
from dynamo_dist.reporting.breaks.causes import CATALOG
from dynamo_dist.reporting.breaks.messages import BreakMessage

__all__ = ["CATALOG", "Advice", "Cause", "advise"]


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice that a report gives about one break. ``cause`` is "" if no entry of the catalog matched."""

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
