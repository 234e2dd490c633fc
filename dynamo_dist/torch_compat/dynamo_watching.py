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
from typing import Any

from dynamo_dist.torch_compat.patching import Change, NotOursError, WrapAttribute, has

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
_applied: list[Change] = []

PLACES = (
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.log_graph_break",
    "torch._dynamo.utils.log_compilation_event",
)


@contextlib.contextmanager
def watch_dynamo(on_break: BreakListener, on_compile: CompileListener) -> Iterator[None]:
    """Tell of every graph break and every compile, whatever TORCH_LOGS says; nothing else changes.

    Wraps two functions while at least one watcher is on: ``InstructionTranslatorBase.log_graph_break``,
    which Dynamo calls once for each break it recovers from, and the hook ``log_compilation_event``,
    which it calls at the end of each compile (unless ``config.log_compilation_metrics`` is off). They run at compile
    time only. Seen in torch 2.13 to 2.15; where one is missing, its events are too.
    """
    watcher = (on_break, on_compile)
    with _watch_lock:
        _watchers.append(watcher)
        if len(_watchers) == 1:
            for change in _changes():
                change.apply()
                _applied.append(change)
    try:
        yield
    finally:
        with _watch_lock:
            _watchers.remove(watcher)
            while not _watchers and _applied:
                # Somebody else may have wrapped ours: then theirs stays, and ours calls nobody.
                with contextlib.suppress(NotOursError):
                    _applied.pop().undo()


def _changes() -> list[Change]:
    import torch._dynamo.symbolic_convert as symbolic_convert
    import torch._dynamo.utils as utils

    def breaks(log_break: Any) -> Any:
        @functools.wraps(log_break)
        def log_graph_break(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = dict(zip(("code_options", "reason", "exc"), args, strict=False)) | kwargs
            exc = bound.get("exc")
            fresh = not getattr(exc, "logged", False)
            result = log_break(self, *args, **kwargs)
            if fresh and isinstance(exc, BaseException):
                _notify(0, lambda: _seen_break(exc, str(bound.get("reason", ""))))
            return result

        return log_graph_break

    def compiles(log_event: Any) -> Any:
        @functools.wraps(log_event)
        def log_compilation_event(metrics: Any) -> Any:
            result = log_event(metrics)
            exc = sys.exc_info()[1]
            _notify(1, lambda: _seen_compile(metrics, exc))
            return result

        return log_compilation_event

    translator = symbolic_convert.InstructionTranslatorBase
    found: list[Change] = []
    if has(translator, "log_graph_break", off="reports have no graph breaks"):
        found.append(WrapAttribute(translator, "log_graph_break", breaks))
    if has(utils, "log_compilation_event", off="reports have no recompiles"):
        found.append(WrapAttribute(utils, "log_compilation_event", compiles))
    return found


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
