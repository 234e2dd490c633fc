"""Dynamo's frames: what is skipped or left alone, and breaks, recompiles and failures as they
happen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch._dynamo.convert_frame as _convert_frame
from torch._C._dynamo import eval_frame as _eval_frame
from torch._dynamo import convert_frame, symbolic_convert, trace_rules, utils
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters

from dynamo_dist.torch_compat import patching
from dynamo_dist.torch_compat.patching import (
    NotOursError,
    OwnState,
    Patch,
    Upstream,
    WrapAttribute,
    WrapFunction,
    has,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeenBreak:
    """One graph break, as Dynamo logs it. ``stack`` is what was being traced, innermost last."""

    kind: str
    message: str
    stack: tuple[traceback.FrameSummary, ...]
    falls_back: bool  # the whole function, or the rest of it, runs eagerly


@dataclass(frozen=True, slots=True)
class SeenCompile:
    """One attempt to compile a frame, done or failed; ``reported`` if a SeenBreak has said why."""

    function: str
    file: str
    line: int
    recompile_reason: str
    failure: str
    message: str
    stack: tuple[traceback.FrameSummary, ...]
    reported: bool
    suppressed: bool
    compile_id: str = ""


BreakListener = Callable[[SeenBreak], None]
CompileListener = Callable[[SeenCompile], None]
_FALLBACK_PREFIXES = (
    "Failed to handle graph break gracefully",
    "Encountered graph break that we cannot resume from",
)
_watch_lock = threading.RLock()
_watchers: list[tuple[BreakListener, CompileListener]] = []
_applied: list[Patch] = []

PLACES = (
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break",
    "torch._dynamo.utils.log_compilation_event",
)


@contextlib.contextmanager
def watch_dynamo(on_break: BreakListener, on_compile: CompileListener) -> Iterator[None]:
    """Tell of every graph break and every compile, whatever TORCH_LOGS says; nothing else changes.

    Wraps two functions while at least one watcher is on:
    ``InstructionTranslatorBase.log_graph_break``, which Dynamo calls once for each break it
    recovers from, and the hook ``log_compilation_event``, which it calls at the end of each compile
    (unless ``config.log_compilation_metrics`` is off). They run at compile time only. Seen in torch
    2.13 to 2.15; where one is missing, its events are too.
    """
    watcher = (on_break, on_compile)
    with _watch_lock:
        _watchers.append(watcher)
        if len(_watchers) == 1:
            for patch in _patches():
                patch.apply()
                _applied.append(patch)
    try:
        yield
    finally:
        with _watch_lock:
            _watchers.remove(watcher)
            while not _watchers and _applied:
                # Somebody else may have wrapped ours: then theirs stays, and ours calls nobody.
                with contextlib.suppress(NotOursError):
                    _applied.pop().undo()


def _patches() -> list[Patch]:
    def log_graph_break(upstream: Upstream, self: Any, *args: Any, **kwargs: Any) -> object:
        bound = dict(zip(("code_options", "reason", "exc"), args, strict=False)) | kwargs
        exc = bound.get("exc")
        # Dynamo calls this for one break at each frame that it passes on its way up.
        fresh = not getattr(exc, "logged", False)
        result = upstream(self, *args, **kwargs)
        if fresh and isinstance(exc, BaseException):
            _notify(0, lambda: _seen_break(exc, str(bound.get("reason", ""))))
        return result

    def log_compilation_event(upstream: Upstream, metrics: Any) -> object:
        result = upstream(metrics)
        # Dynamo calls the hook while it handles the error of a failed compile; the metrics hold
        # its text only.
        exc = sys.exc_info()[1]
        _notify(1, lambda: _seen_compile(metrics, exc))
        return result

    translator = symbolic_convert.InstructionTranslatorBase
    found: list[Patch] = []
    if has(translator, "log_graph_break", off="reports have no graph breaks"):
        found.append(WrapFunction(translator, "log_graph_break", log_graph_break))
    if has(utils, "log_compilation_event", off="reports have no recompiles"):
        found.append(WrapFunction(utils, "log_compilation_event", log_compilation_event))
    return found


def _notify(which: int, make: Callable[[], Any]) -> None:
    with _watch_lock:
        # A copy: a listener may add or remove watchers.
        listeners = [watcher[which] for watcher in _watchers]
    if not listeners:
        return
    try:
        event = make()
        for listener in listeners:
            listener(event)
    except Exception:
        log.exception("A watcher of graph breaks raised; the compile goes on.")


def _seen_break(exc: BaseException, reason: str) -> SeenBreak:
    error_type = getattr(getattr(exc, "error_type", None), "name", "")
    kind = getattr(exc, "gb_type", None) or f"{type(exc).__name__}: {error_type}".rstrip(": ")
    return SeenBreak(
        kind=kind,
        message=str(getattr(exc, "msg", None) or exc),
        stack=_traced_stack(exc),
        falls_back=reason.startswith(_FALLBACK_PREFIXES),
    )


def _seen_compile(metrics: Any, exc: BaseException | None) -> SeenCompile:
    failure = str(metrics.fail_type or "")
    return SeenCompile(
        function=str(metrics.co_name or ""),
        file=str(metrics.co_filename or ""),
        line=int(metrics.co_firstlineno or 0),
        recompile_reason=str(metrics.recompile_reason or ""),
        failure=failure,
        message=str(metrics.fail_reason or ""),
        stack=_traced_stack(exc) if failure and exc is not None else (),
        reported=bool(getattr(exc, "logged", False)),
        suppressed=bool(metrics.config_suppress_errors),
        compile_id=str(metrics.compile_id or ""),
    )


def _traced_stack(exc: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """The user's frames that were being traced: Dynamo's record, else its translators in the
    traceback.
    """
    recorded = getattr(exc, "real_stack", None)
    if recorded:
        return tuple(recorded)
    frames: dict[int, traceback.FrameSummary] = {}
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        # Frames of translators in the traceback are the user's frames that they were tracing,
        # outermost first.
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase):
            frames[id(translator)] = translator.frame_summary()
    return tuple(frames.values())


class SkippedFrames(OwnState):
    """Let Dynamo look anew at functions that it has given up on, at either switch.

    A function without one graph is marked for good, whatever compiles it later, and a mark outlives
    the rules by which it was made. Compiled code stays: only functions without any are forgotten.
    ``input_codes`` and ``_debug_get_cache_entry_list`` were seen in 2.13 to 2.15.
    """

    def apply(self) -> None:
        for code in [reference() for reference in _convert_frame.input_codes.seen]:
            # Resetting a code object that has entries would throw compiled graphs away.
            if code is not None and not _eval_frame._debug_get_cache_entry_list(code):
                _eval_frame.reset_code(code)

    undo = apply


def frames_left_alone(is_ours: Callable[[str], bool], dispatches: Callable[[str], bool]) -> Patch:
    """Have Dynamo run functions in files that ``is_ours`` as they are, where none that it traces
    calls them.

    Eager mode calls them inside a function that Dynamo gave up on, such as one with a break in a
    loop. Then it looks at each frame below, and would compile our dispatching of operators, as it
    never does torch's own. Where a file ``dispatches``, it does not look at what its functions call
    either: they answer calls that torch answers in C++, and Dynamo would compile methods of DTensor
    that they use, as though the user had called them. ``CatchErrorsWrapper`` and
    ``_FrameExecStrategy`` were seen in 2.13.
    """
    # The first action is for the frame itself, the second for all frames that it calls.
    unseen = _eval_frame._FrameExecStrategy(
        _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP
    )

    def wrap(upstream: Any) -> Any:
        @functools.wraps(upstream)
        def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            file = frame.f_code.co_filename
            if dispatches(file):
                return ConvertFrameReturn(frame_exec_strategy=unseen)
            return ConvertFrameReturn() if is_ours(file) else upstream(self, frame, *args, **kwargs)

        return call

    return WrapAttribute(_convert_frame.CatchErrorsWrapper, "__call__", wrap)


def ask_before_giving_up(stays: Callable[[int | None, str], bool]) -> list[Patch]:
    """Compile a function again beyond a limit, instead of running it in Python, where ``stays``
    says so.

    It gets Dynamo's number of the function and the limit's name. ``exceeds_recompile_limit`` was
    seen in 2.13 to 2.15.
    """
    name = "exceeds_recompile_limit"
    if not has(convert_frame, name, off="at recompile_limit one rank may leave the job's order"):
        return []

    def exceeds(upstream: Upstream, cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = upstream(cache_size, compile_id)
        # Dynamo calls this before each further compile of a function, so the answer may change.
        if exceeded and stays(getattr(compile_id, "frame_id", None), limit):
            return False, ""
        return exceeded, limit

    return [WrapFunction(convert_frame, name, exceeds)]


def on_what_is_left_to_python(
    tell: Callable[[types.CodeType], None], stays: Callable[[types.CodeType], bool]
) -> list[Patch]:
    """Report each frame that Dynamo could not compile to ``tell``, before it runs eagerly.

    ``tell`` may raise. It does not hear of frames without anything to compile. Nor does it hear of
    a context manager's generator, which Dynamo compiles with its caller or not at all: the caller
    is reported then. A function for which ``stays`` is true is neither compiled nor inlined, unless
    ``fullgraph`` allows no break. A collective that eager code calls is not compiled by itself.
    ``ConvertFrame``, what it returns, its counters, ``trace_rules.check_verbose`` and
    ``SkipResult`` were seen in 2.13 to 2.15.
    """
    off = "ranks are not told of a function that one leaves to Python"
    if not has(convert_frame, "ConvertFrame", off=off):
        return []
    converter = convert_frame.ConvertFrame
    around = {__file__, patching.__file__, convert_frame.__file__}

    def call(
        upstream: Upstream,
        self: Any,
        frame: Any,
        *args: Any,
        skip: int = 0,
        **named: Any,
    ) -> Any:
        if stays(frame.f_code) or is_deprecated_collective(frame):
            return ConvertFrameReturn()
        fine = counters["frames"]["ok"]
        # Two more frames of ours, which Dynamo leaves out of the stacks that it logs.
        result = upstream(self, frame, *args, skip=skip + 2, **named)
        left = counters["frames"]["ok"] == fine  # or an error that Dynamo took back
        if left and not (frame.f_code.co_flags & inspect.CO_GENERATOR and makes_manager()):
            tell(frame.f_code)
        return result

    def makes_manager() -> bool:
        caller: types.FrameType | None = sys._getframe(2)
        while caller is not None and caller.f_code.co_filename in around:
            caller = caller.f_back
        return caller is not None and caller.f_code.co_filename == contextlib.__file__

    def may_break() -> bool:
        translator: object = InstructionTranslator.current_tx()
        return not any(getattr(translator, n, False) for n in ("one_graph", "error_on_graph_break"))

    def stays_out(function: Any) -> bool:
        try:
            code = function.get_code()
        except (AttributeError, NotImplementedError):  # not a function of Python's
            return False
        return stays(code) and may_break()

    def check(
        upstream: Upstream, function: Any, is_inlined_call: bool = False, *rest: Any, **named: Any
    ) -> Any:
        result = upstream(function, is_inlined_call, *rest, **named)
        # Inlined, the function's collectives would be in the caller's graph on this rank and in
        # eager mode on others.
        if is_inlined_call and not result.skipped and stays_out(function):
            return trace_rules.SkipResult(True, "this rank has left it to Python before")
        return result

    return [
        WrapFunction(converter, "__call__", call),
        WrapFunction(trace_rules, "check_verbose", check),
    ]


def is_deprecated_collective(frame: types.FrameType) -> bool:
    """Return whether a frame only warns before it calls a collective of ``torch.distributed``.

    Dynamo leaves those to Python where Python calls them, but not the wrapper that
    ``typing_extensions.deprecated`` puts around some, from 2.13 on: a graph of one launch, and
    known by lines that no graph of its caller has. ``arg`` is a name there.
    """
    if frame.f_code.co_name != "wrapper" or "arg" not in frame.f_code.co_freevars:
        return False
    wrapped = frame.f_locals.get("arg")
    return getattr(wrapped, "__module__", "") == "torch.distributed.distributed_c10d"
