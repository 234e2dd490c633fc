"""One row of the table of causes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One row. The three patterns are searched for and all that are given must be found.

    ``kind`` is matched with Dynamo's fixed name of the break, ``detail`` with its explanation and
    developer's context, ``calls`` with the lines ``file: function: code`` from the user's line
    inwards (files of torch start with ``torch/``, the user's have no folder). ``why`` and ``fix`` may name
    groups of the patterns as ``$group``; ``fix`` is Python or shell code, and "" means that Dynamo's hints
    serve.
    """

    name: str
    why: str
    fix: str = ""
    kind: str = ""
    detail: str = ""
    calls: str = ""
