"""Functions that Dynamo would leave to Python: compiled all the same, or ranks are told.

Python launches in the program's order, on this rank alone: its peers, who launch in the order that
all have settled, would wait or take other data. Dynamo runs a function in Python once it has
compiled it ``recompile_limit`` times: if it launches otherwise than Python would, it stays
compiled. And it does so where a graph break stands in a loop or a ``try``, behind which it cannot
go on: then the function keeps the program's order on all ranks, and this one runs it in Python for
as long as the job lasts. Else a rank that compiles its caller again, for a batch of another length
and without that break, would launch what its peers know nothing of.
"""

from __future__ import annotations

import logging
import types

from dynamo_dist.torch_compat import dynamo_frames
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.ranks import decision

log = logging.getLogger(__name__)

_told: set[int] = set()


def patches() -> list[Patch]:
    """List the changes to apply while the plugin is enabled."""
    return [
        *dynamo_frames.ask_before_giving_up(stays_compiled),
        *dynamo_frames.on_what_is_left_to_python(left_to_python, stays_in_python),
    ]


def left_to_python(code: types.CodeType) -> None:
    """Dynamo could not compile a function. Raises CannotFollowError where other ranks launch by
    a plan for it.
    """
    if (job := decision.current()) is not None:
        job.leave_to_python(code)


def stays_in_python(code: types.CodeType) -> bool:
    """Return whether a function was left to Python before, in this job."""
    return (job := decision.current()) is not None and job.is_left_to_python(code)


def stays_compiled(frame_id: int | None, limit: str) -> bool:
    """Return whether a function, by Dynamo's number in this process, is compiled again beyond a
    limit.
    """
    job = decision.current()
    if job is None or frame_id is None or not job.is_unlike_python(frame_id):
        return False
    if frame_id not in _told:
        _told.add(frame_id)
        log.warning(
            "A function is compiled again although torch._dynamo.config.%s is reached: it launches "
            "in an order that all "
            "ranks have settled, or gathers parameters again, as Python would not. Each further "
            "length costs a compile; "
            "let sizes be dynamic (dynamic=None or True, or torch._dynamo.mark_dynamic).",
            limit,
        )
    return True
