"""Functions whose launches have an order of their own stay compiled, however often they are compiled again.

Dynamo runs a function in Python once it has compiled it ``recompile_limit`` times. That is the program's order of
launches, on this rank alone: its peers, who launch in the order that all have settled, would wait or take other data.
"""

from __future__ import annotations

import logging

from dynamo_dist._torch import Change
from dynamo_dist.runtime import _torch
from inductor_passes.agree import orders

log = logging.getLogger(__name__)

_told: set[int] = set()


def changes() -> list[Change]:
    """What to apply while the plugin is enabled."""
    return _torch.ask_before_giving_up(stays_compiled)


def stays_compiled(frame_id: int | None, limit: str) -> bool:
    """Whether a function, by Dynamo's number in this process, is compiled again beyond a limit."""
    job = orders.current()
    if job is None or frame_id is None or not job.has_plan(frame_id):
        return False
    if frame_id not in _told:
        _told.add(frame_id)
        log.warning(
            "A function is compiled again although torch._dynamo.config.%s is reached: its launches are in an "
            "order that all ranks have settled, which Python would not keep. Each further length costs a compile; "
            "let sizes be dynamic (dynamic=None or True, or torch._dynamo.mark_dynamic).",
            limit,
        )
    return True
