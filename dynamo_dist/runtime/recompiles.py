"""Keep functions compiled that Dynamo would run eagerly, or report the fallback to all ranks.

An eager fallback launches collectives in the program's order, on this rank alone. Its peers launch
them in the order that all ranks agreed on, so they would wait or take other data.

Dynamo runs a function eagerly once it has compiled it ``recompile_limit`` times. If the compiled
function launches otherwise than eager mode would, it stays compiled.

Dynamo also runs a function eagerly where a graph break stands in a loop or a ``try``, after which
it cannot resume. Then the function keeps the program's order on all ranks, and this rank runs it
eagerly for as long as the job lasts. Otherwise this rank could compile its caller again, for a
batch of another length and without that break. It would then launch collectives that its peers do
not expect.
"""

from __future__ import annotations

import logging
import types

from dynamo_dist.torch_compat import dynamo_frames
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.ranks import decision

log = logging.getLogger(__name__)

_warned: set[int] = set()


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
    if frame_id not in _warned:
        _warned.add(frame_id)
        log.warning(
            "A function is compiled again although torch._dynamo.config.%s is reached: all ranks "
            "agreed on collectives that differ from eager mode's, so it cannot run in eager mode. "
            "Each further length costs a compile; "
            "let sizes be dynamic (dynamic=None or True, or torch._dynamo.mark_dynamic).",
            limit,
        )
    return True
