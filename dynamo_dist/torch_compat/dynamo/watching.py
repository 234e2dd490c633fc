"""Graph breaks, recompiles and failed compiles, seen as they happen."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dynamo_dist.torch_compat.dynamo import left_to_python

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
    """One attempt to compile a frame, done or failed; ``reported`` if a SeenBreak told of the failure."""

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
_unwatch: list[Callable[[], None]] = []


@contextlib.contextmanager
def watch_dynamo(on_break: BreakListener, on_compile: CompileListener) -> Iterator[None]:
    """Tell of every graph break and every compile, whatever TORCH_LOGS says; nothing else changes.

    Wraps three functions while at least one watcher is on: ``InstructionTranslatorBase.log_graph_break``,
    which Dynamo calls once for each break it recovers from, the hook ``log_compilation_event``,
    which it calls at the end of each compile (unless ``config.log_compilation_metrics`` is off), and
    ``CatchErrorsWrapper.__call__``, which it asks for each frame that has no code yet. They run at compile time only. Seen in torch 2.13 to 2.15; where one is missing, its events are too.
    """
    watcher = (on_break, on_compile)
    with _watch_lock:
        _watchers.append(watcher)
        if len(_watchers) == 1:
            _unwatch.extend(_wrap_dynamo())
    try:
        yield
    finally:
        with _watch_lock:
            _watchers.remove(watcher)
            if not _watchers:
                while _unwatch:
                    _unwatch.pop()()


def _wrap_dynamo() -> Iterator[Callable[[], None]]:
    import torch._dynamo.convert_frame as convert_frame
    import torch._dynamo.symbolic_convert as symbolic_convert
    import torch._dynamo.utils as utils

    translator = getattr(symbolic_convert, "InstructionTranslatorBase", None)
    log_break = getattr(translator, "log_graph_break", None)
    if translator is not None and log_break is not None:

        @functools.wraps(log_break)
        def log_graph_break(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = dict(zip(("code_options", "reason", "exc"), args, strict=False)) | kwargs
            exc = bound.get("exc")
            fresh = not getattr(exc, "logged", False)
            result = log_break(self, *args, **kwargs)
            if fresh and isinstance(exc, BaseException):
                _notify(0, lambda: _seen_break(exc, str(bound.get("reason", ""))))
            return result

        yield _replace(translator, "log_graph_break", log_graph_break)

    log_event = getattr(utils, "log_compilation_event", None)
    if log_event is not None:

        @functools.wraps(log_event)
        def log_compilation_event(metrics: Any) -> Any:
            result = log_event(metrics)
            exc = sys.exc_info()[1]
            _notify(1, lambda: _seen_compile(metrics, exc))
            return result

        yield _replace(utils, "log_compilation_event", log_compilation_event)

    catcher = getattr(convert_frame, "CatchErrorsWrapper", None)
    if catcher is not None:
        told = left_to_python.telling(catcher.__call__, _left)
        yield _replace(catcher, "__call__", told)


def _replace(owner: Any, name: str, wrapper: Any) -> Callable[[], None]:
    original = owner.__dict__[name]
    setattr(owner, name, wrapper)

    def restore() -> None:
        # Somebody else may have wrapped ours: then theirs stays, and ours calls nobody.
        if owner.__dict__.get(name) is wrapper:
            setattr(owner, name, original)

    return restore


def _notify(which: int, make: Callable[[], Any]) -> None:
    with _watch_lock:
        listeners = [watcher[which] for watcher in _watchers]
    if not listeners:
        return
    try:
        event = make()
        for listener in listeners:
            listener(event)
    except Exception:
        log.exception("A watcher of graph breaks raised; the compile goes on.")


def _left(frame: FrameType, modes: list[str]) -> None:
    """Python runs a function that was to be compiled: all of it, without a break that Dynamo counts."""
    under = ", ".join(modes)
    message = (
        f"{left_to_python.KIND}\n  Explanation: torch runs it in eager mode under {under}, without a word."
        f"\n\n  Developer debug context: {under}"
    )
    stack = left_to_python.stack_of(frame)
    _notify(0, lambda: SeenBreak(left_to_python.KIND, message, stack, falls_back=True))


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
    failure = str(getattr(metrics, "fail_type", None) or "")
    return SeenCompile(
        function=str(getattr(metrics, "co_name", None) or ""),
        file=str(getattr(metrics, "co_filename", None) or ""),
        line=int(getattr(metrics, "co_firstlineno", None) or 0),
        recompile_reason=str(getattr(metrics, "recompile_reason", None) or ""),
        failure=failure,
        message=str(getattr(metrics, "fail_reason", None) or ""),
        stack=_traced_stack(exc) if failure and exc is not None else (),
        reported=bool(getattr(exc, "logged", False)),
        suppressed=bool(getattr(metrics, "config_suppress_errors", None)),
        compile_id=str(getattr(metrics, "compile_id", None) or ""),
    )


def _traced_stack(exc: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """The user's frames that were being traced: Dynamo's record, else its translators in the traceback."""
    recorded = getattr(exc, "real_stack", None)
    if recorded:
        return tuple(recorded)
    frames: dict[int, traceback.FrameSummary] = {}
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        translator: Any = frame.f_locals.get("self")
        if hasattr(translator, "frame_summary") and hasattr(translator, "f_code"):
            frames[id(translator)] = translator.frame_summary()
    return tuple(frames.values())
