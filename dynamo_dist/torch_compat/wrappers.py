"""Marks that AOTAutograd puts on the nodes of a gather and a reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.fx.traceback as _traceback
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.rewrite.bucket import GATHERED_FOR


@contextlib.contextmanager
def traced_with(**marks: Any) -> Iterator[None]:
    """What AOTAutograd traces in the block has these in its nodes' metadata."""
    known = _traceback.get_current_meta()
    before = {name: known[name] for name in marks if name in known}
    known.update(marks)
    try:
        yield
    finally:
        for name in marks:
            known.pop(name, None)
        known.update(before)


def gathered(group: str, *, again: bool) -> contextlib.AbstractContextManager[None]:
    """Mark what AOTAutograd traces in the block as the gather of a parameter of ``group``, or the reduction of its gradient.

    ``again``: its result is not kept for backward, which computes it again, as in a checkpoint.
    """
    marks: dict[str, Any] = {"recompute": CheckpointPolicy.MUST_RECOMPUTE} if again else {}
    if group:
        custom = _traceback.get_current_meta().get("custom") or {}
        marks["custom"] = {**custom, GATHERED_FOR: group}
    return traced_with(**marks)
