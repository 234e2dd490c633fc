"""Functions that Dynamo does not look at, because a dispatch mode is on: Python runs them, and torch says nothing of it."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.trace_rules as _trace_rules
import torch.utils._python_dispatch as _python_dispatch

KIND = "Compiled function called while a dispatch mode is on"

# Called with the frame and the names of the modes.
Tell = Callable[[FrameType, list[str]], None]


def telling(stock: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    """``CatchErrorsWrapper.__call__``, which is asked for each frame to compile, that tells of those.

    Of the outermost one: what Python then calls from there is left to it as well. Seen in 2.13 to 2.15.
    """
    told: WeakSet[CodeType] = WeakSet()

    @functools.wraps(stock)
    def call(self: Any, frame: FrameType, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, frame, *args, **kwargs)
        if getattr(result, "guarded_code", None) is None and _is_left(frame):
            if not _is_called_from(told):
                tell(frame, _modes())
            told.add(frame.f_code)
        return result

    return call


def stack_of(frame: FrameType) -> tuple[traceback.FrameSummary, ...]:
    """The frame as the innermost of a stack, where its function begins."""
    code = frame.f_code
    return (
        *traceback.extract_stack(),
        traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name),
    )


def _is_left(frame: FrameType) -> bool:
    if not _python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return False
    return not _trace_rules.check(frame.f_code) and _convert_frame.has_tensor_in_frame(frame)


def _is_called_from(told: WeakSet[CodeType]) -> bool:
    """Return whether one of these is on the stack. What Dynamo hands over does not know its caller."""
    above: FrameType | None = sys._getframe(1)
    while above is not None:
        if above.f_code in told:
            return True
        above = above.f_back
    return False


def _modes() -> list[str]:
    return [type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()]
