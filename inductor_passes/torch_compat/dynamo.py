"""Dynamo: where a compile stands, its graph, its frame, and the logs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import _logging
from torch._guards import CompileContext, TracingContext
from torch._logging import _internal


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """Return the logger that ``TORCH_LOGS=artifact`` sets, or else the module's own.

    It is the module's own where torch did not know the artifact in time. ``getArtifactLogger`` was
    seen in 2.11 to 2.15.
    """
    try:
        return _internal.getArtifactLogger(module, artifact)
    except ValueError:
        return logging.getLogger(module)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Hand a text to torch's structured trace, where tlparse finds it. Seen in 2.11 to 2.15."""
    structured: Any = getattr(_logging, "trace_structured")  # noqa: B009 - not exported
    structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
    )


WAIT_TIMER = "inductor_passes.wait"
_waits = threading.local()


@contextlib.contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """Torch's timers count the block as a wait for other ranks; within another wait it is part of
    that. ``dynamo_timed`` was seen in 2.13.
    """
    if getattr(_waits, "is_inside", False):
        yield
        return
    from torch._dynamo.utils import dynamo_timed  # slow to import

    _waits.is_inside = True
    try:
        with dynamo_timed(f"{WAIT_TIMER}.{for_what}"):
            yield
    finally:
        _waits.is_inside = False


def graph_being_compiled() -> str:
    """AOTAutograd's name of the graph in work, such as ``model__0_backward_1``, or "".

    Seen in 2.11 to 2.15.
    """
    from torch._functorch import aot_autograd  # loads Dynamo and Inductor

    name = getattr(aot_autograd, "get_graph_being_compiled", None)
    try:
        return str(name()) if name is not None else ""
    except (IndexError, AttributeError):
        return ""


def compile_id() -> str:
    """Dynamo's id of the compile in work, such as ``0/0``, or "". Seen in 2.11 to 2.15."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def frame_number() -> int | None:
    """Dynamo's number of the function in work; None outside of a compile. Seen in 2.11 to 2.15."""
    number = getattr(CompileContext.current_compile_id(), "frame_id", None)
    return number if isinstance(number, int) else None


def compile_again() -> None:
    """Allow a second compile of the graph in work, whose first result has recorded its strides.

    ``TracingContext.output_strides`` was seen in 2.11 to 2.15.
    """
    # Inductor asserts that the list is empty before it puts the strides of a compile there.
    strides = getattr(trace_in_work(), "output_strides", None)
    if strides:
        strides.clear()


def trace_in_work() -> Any:
    """Return torch's context of one trace, from Dynamo to its last backward graph, or None
    outside of one.
    """
    return TracingContext.try_get()


def own_id_of_trace(make: Callable[[], str]) -> str:
    """Return what ``make`` has made for the trace in work, made once; outside of a trace each time.

    It is kept on torch's context, which lives exactly as long as the trace.
    """
    trace = trace_in_work()
    found = getattr(trace, "dist_graph_id", None)
    if found is not None:
        return str(found)
    made = make()
    if trace is not None:
        trace.dist_graph_id = made
    return made


def metadata_in_work() -> Any:
    """Return what AOTAutograd has noted of inputs and outputs of the graph in work.
    ``fw_metadata`` was seen in 2.11 to 2.15.
    """
    return getattr(trace_in_work(), "fw_metadata", None)


def sharded_inputs() -> list[tuple[tuple[Any, ...], Any]]:
    """Global shape and DTensorSpec of each DTensor input of the graph that AOTAutograd has in work.

    ``TracingContext.fw_metadata.subclass_inp_meta`` was seen in 2.11 to 2.15.
    """
    metadata = getattr(trace_in_work(), "fw_metadata", None)
    found = []
    for entry in getattr(metadata, "subclass_inp_meta", None) or ():
        meta, shape = getattr(entry, "meta", None), getattr(entry, "outer_size", None)
        spec = meta[0] if isinstance(meta, tuple) and meta else None
        if shape is not None and hasattr(spec, "placements") and hasattr(spec, "mesh"):
            found.append((tuple(shape), spec))
    return found


def source_of(code: Any) -> str | None:
    """The Python wrapper code of a compiled graph, or None if it has none to show.

    ``CompiledFxGraph.source_code`` was seen in 2.11 to 2.15.
    """
    source = getattr(code, "source_code", None)
    return source if isinstance(source, str) and source else None


def frame_in_work() -> tuple[bool, str]:
    """Return whether the frame in work is only part of a function, and ``root_of`` its code.

    A frame is a part if a graph break ends its graph, or if it resumes after one. Later calls in
    the same compile, in its backward graph too, return the same answer.
    ``compile_subgraph_reason``, ``root_tx`` and ``f_locals`` were seen in 2.11 to 2.15.
    """
    trace = trace_in_work()
    known: tuple[bool, str] | None = getattr(trace, "dist_frame", None)
    if known is not None:
        return known
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loads all of Dynamo

    try:
        output: Any = InstructionTranslator.current_tx().output
        code, local = output.root_tx.f_code, output.root_tx.f_locals
    except AttributeError:  # no frame is being compiled
        return False, ""
    resumed = without_resuming(code.co_name) != code.co_name
    reason = getattr(output, "compile_subgraph_reason", None)
    found = resumed or bool(getattr(reason, "graph_break", False)), root_of(_called(code, local))
    if trace is not None:
        # Kept on the trace: the backward graph is compiled after Dynamo has left the frame.
        trace.dist_frame = found
    return found


def root_of(code: types.CodeType) -> str:
    """Return a function that Dynamo compiles, as ``name (file:first-last)``.

    These are its lines, and its file without folders. A frame that resumes after a graph break
    counts as the function that was broken. ``generated_code_metadata`` was seen in 2.11 to 2.15.
    """
    from torch._dynamo.resume_execution import ContinueExecutionCache  # loads all of Dynamo

    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    whole = code if resumed is None else resumed.code
    last = max((line for *_, line in whole.co_lines() if line), default=whole.co_firstlineno)
    where = f"{os.path.basename(whole.co_filename)}:{whole.co_firstlineno}-{last}"
    return f"{without_resuming(whole.co_name)} ({where})"


def _called(code: types.CodeType, local: Mapping[str, Any]) -> types.CodeType:
    """The code of what a frame calls that torch puts around functions of torch and, up to 2.12,
    of no file.
    """
    from torch._dynamo import external_utils  # loads all of Dynamo

    if code.co_filename != external_utils.__file__:
        return code
    called = getattr(local.get("fn"), "forward", local.get("fn"))
    return getattr(getattr(called, "__func__", called), "__code__", code)


def callers() -> frozenset[str]:
    """``function:line`` of everything on this thread's stack, as the lines that lead to a launch
    are named; but for what Dynamo runs to compile a function.
    """
    from torch._dynamo import convert_frame  # loads all of Dynamo

    found: set[str] = set()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == convert_frame.__file__:
            # All so far is Dynamo's own: one of its methods is named step, as many programs' are.
            found.clear()
            frame = frame.f_back
            continue
        found.add(f"{without_resuming(frame.f_code.co_name)}:{frame.f_lineno}")
        frame = frame.f_back
    return frozenset(found)


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def without_resuming(name: str) -> str:
    """Return a function's name in the program, given one that Dynamo made to resume a graph break.

    Any other name is returned as it is. Seen in 2.11 to 2.15.
    """
    while found := _RESUMED.fullmatch(name):
        name = found[1]
    return name


def guard_frame(check: Callable[[], bool]) -> None:
    """Compile the frame in work again once ``check`` fails. Without a frame in work, nothing.

    ``GlobalStateSource``, ``Source.make_guard`` and ``GuardBuilder.guard_manager.root`` were seen
    in 2.11 to 2.15.
    """
    trace = trace_in_work()
    if trace is None:
        return
    from torch._dynamo.source import GlobalStateSource  # loads all of Dynamo

    guard = GlobalStateSource().make_guard(functools.partial(_HOLDS, check=check))
    trace.guards_context.dynamo_guards.add(guard)


def _HOLDS(builder: Any, guard: Any, *, check: Callable[[], bool]) -> None:
    from torch._dynamo.guards import get_verbose_code_parts  # loads all of Dynamo

    # Dynamo shows this text where it explains a recompile.
    code = get_verbose_code_parts("the order of launches is still that of all ranks", guard)
    builder.guard_manager.root.add_lambda_guard(lambda _: check(), code, guard.user_stack)


def compiles_autograd() -> bool:
    """Return whether compiled autograd traces backward passes anew: no backward graph of their
    forward runs.

    ``compiled_autograd_enabled`` was seen in 2.11 to 2.15.
    """
    from torch._dynamo import compiled_autograd, config  # loads all of Dynamo

    return config.compiled_autograd or compiled_autograd.compiled_autograd_enabled
