"""Work in flight: its handles in traced code, and Dynamo's tracker of them.

The start of a collective is separate from its end. ``started`` are the results of functional
collectives that nobody has waited for, ``outputs`` the buffers that the program passed in, and
``finish(launched, outputs)`` waits and copies. Traced, ``start`` is a ``WorkVariable`` whose
``wait()`` traces ``finish`` right there; a Work that leaves the graph is a ``GraphWork``, which
calls the same function. It is made and waited for where Dynamo may look at every frame, so it keeps
Dynamo out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.fx.experimental.symbolic_shapes import guard_or_false

from dynamo_dist.errors import InFlightError
from dynamo_dist.torch_compat import (
    dtensor_specs,
    dynamo_building,
    dynamo_calls,
    dynamo_guards,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import attributes
from dynamo_dist.tracing.functional import next_serial

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import PyCodegen, Source, VariableTracker

Finish = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class GraphWork(dist.Work):
    """A Work launched by a compiled function; ``wait()`` fills the buffers it was launched for."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self,
        finish: Finish | None = None,
        started: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._finish, self._started, self._outputs = finish, started or [], outputs or []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self, timeout: object = None) -> bool:
        """Wait, without a deadline of its own: ``timeout`` is that of the process group. True."""
        # Programs wait more than once; what the buffers hold meanwhile is theirs.
        if (finish := self._finish) is not None:
            self._finish = None
            finish(self._started, self._outputs)
            self._started = []
        return True

    def is_completed(self) -> bool:
        """Wait, and return True: a compiled program has no way to see progress."""
        return self.wait()

    def is_success(self) -> bool:
        """True: asking waits, and a failed wait raises."""
        return self.wait()

    def exception(self) -> None:
        """None: a failed wait raises."""
        self.wait()

    def synchronize(self) -> None:
        """The same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output buffers, filled."""
        self.wait()
        return self._outputs

    def get_future(self) -> GraphFuture:
        """A future of the output buffers."""
        return GraphFuture(self)


class GraphFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a ``GraphWork``, or of a callback on one."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self, of: GraphWork | GraphFuture, callback: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        self._of, self._callback = of, callback

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> object:
        """Return the value of the collective, or of the callback. A callback runs once, at the
        first ask.
        """
        # The callback's result is kept by torch's future, so it runs once.
        if not super().done():
            self._of.wait()
            if self._callback is not None:
                self.set_result(self._callback(self._of))
            else:
                self.set_result(self._of.result() if isinstance(self._of, GraphWork) else None)
        return super().wait()

    def value(self) -> Any:
        """The same as ``wait()``."""
        return self.wait()

    def done(self) -> bool:
        """True: asking waits."""
        self.wait()
        return True

    def then(self, callback: Callable[[Any], Any]) -> GraphFuture:
        """The future of ``callback(self)``, which runs when it is waited for."""
        return GraphFuture(self, callback)


def start(finish: Finish, started: list[torch.Tensor], outputs: list[torch.Tensor]) -> dist.Work:
    """A Work for what has been launched; a ``WorkVariable`` when traced."""
    return GraphWork(finish, started, outputs)


def end(
    finish: Finish,
    started: list[torch.Tensor],
    outputs: list[torch.Tensor],
    async_op: bool,
) -> dist.Work | None:
    """Return the result of a c10d function: a Work in flight, or None after waiting."""
    if async_op:
        return start(finish, started, outputs)
    finish(started, outputs)
    return None


def wait(started: torch.Tensor) -> torch.Tensor:
    """The value of a launch, once it is there."""
    return torch.ops._c10d_functional.wait_tensor(started)


def only_wait(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish a launch that gives nothing: a send, a barrier."""
    for each in started:
        # An operator with effects and a number of its own: nobody uses its result, and equal calls
        # would be merged.
        torch.ops.dynamo_dist.wait_tensor(each, next_serial())


def copy_back(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish launches of one result for each buffer; shapes may differ, numbers of elements do
    not.
    """
    for each, output in zip(started, outputs, strict=True):
        # c10d's buffers are outside of autograd, in eager mode too.
        buffer, result = plain(output), wait(each)
        if not _is_shaped_alike(result, buffer):
            torch._check(result.numel() == buffer.numel())  # sizes that only the data knows
            result = result.view(buffer.shape)
        buffer.copy_(result)


def _is_shaped_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two shapes are known to be equal."""
    if first.dim() != second.dim():
        return False
    return all(guard_or_false(first.shape[i] == second.shape[i]) for i in range(first.dim()))


def split_back(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish one launch whose flat result holds the buffers' elements one after the other."""
    flat = wait(started[0]).view(-1)
    offset = 0
    for output in outputs:
        buffer = plain(output)
        buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))
        offset = offset + buffer.numel()


def padded_back(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish one launch whose flat result holds the buffers' elements in equal, padded rows."""
    flat = wait(started[0]).view(len(outputs), -1)
    for rank, output in enumerate(outputs):
        buffer = plain(output)
        buffer.copy_(flat[rank, : buffer.numel()].view(buffer.shape))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as c10d sees it: without autograd, complex numbers as pairs of real ones."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def payload(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as it is sent: plain, its elements one after the other in memory."""
    # Whether it is contiguous already is not asked: in a hook on a gradient that cannot be traced.
    return plain(tensor).contiguous()


log = logging.getLogger(__name__)

_OURS = str(Path(__file__).parents[1])

# What a program asks of a Work that waits and then gives True; ``exception`` and ``synchronize``
# give None.
_GIVES_TRUE = frozenset({"wait", "is_completed", "is_success"})
_GIVES_NONE = frozenset({"exception", "synchronize"})
WORK_METHODS = _GIVES_TRUE | _GIVES_NONE | {"result", "get_future"}
FUTURE_METHODS = frozenset({"wait", "value", "done", "then"})


@dataclass(slots=True)
class Traced:
    """The state that the lowering keeps for one trace."""

    serials: int = 0
    works: list[WorkVariable] = field(default_factory=list)
    futures: list[FutureVariable] = field(default_factory=list)
    managers: dict[str, list[Any]] = field(default_factory=dict)
    has_launched: bool = False


def traced(tx: Any) -> Traced:
    """The state of the trace that ``tx`` belongs to."""
    return dynamo_calls.trace_state(tx, Traced)


class InFlightVariable(dynamo_calls.ObjectTracker):
    """A Work or its future: methods by name, and nothing else."""

    members = WORK_METHODS

    def attribute(self, tx: Any, name: str) -> Any:
        if name not in self.members:
            _refuse(name)
        return attributes.bound_method(self, tx, name)


class WorkVariable(InFlightVariable):
    """A Work launched in this graph. The first method that needs it done traces its end, there."""

    def __init__(
        self,
        finish: object,
        started: object,
        outputs: object,
        buffers: list[torch.Tensor],
        line: str,
        **kw: object,
    ) -> None:
        super().__init__(**kw)
        self.finish, self.started, self.outputs = finish, started, outputs
        self.buffers, self.line = buffers, line
        self.done = self.left = False

    def traced_type(self) -> type:
        return GraphWork

    def method(self, tx: Any, name: str, args: list[object], kwargs: dict[str, object]) -> Any:
        if name == "get_future":
            return FutureVariable(self, None)
        if name not in WORK_METHODS:
            _refuse(name)
        self.end(tx)
        if name == "result":
            return self.outputs
        return dynamo_building.build(tx, True if name in _GIVES_TRUE else None)

    def end(self, tx: Any) -> None:
        """Trace the wait and the copy into the buffers, once."""
        if not self.done:
            self.done = True
            # Removed first, because the copy below uses buffers that count as in flight otherwise.
            traced(tx).works.remove(self)
            dynamo_building.call_traced(tx, self.finish, [self.started, self.outputs], {})

    def reconstruct(self, codegen: PyCodegen) -> None:
        self.left = True
        # A Work that is done inside still is an object to the program, and its ``wait()`` does
        # nothing.
        finish = dynamo_building.build(codegen.tx, None) if self.done else self.finish
        started = dynamo_building.build_list(codegen.tx, []) if self.done else self.started
        dynamo_calls.construct_on_return(codegen, GraphWork, [finish, started, self.outputs])


class FutureVariable(InFlightVariable):
    """The future of a Work, or of a callback on a future; a callback is traced at the first
    wait.
    """

    members = FUTURE_METHODS

    def __init__(self, of: Any, callback: Any, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.of, self.callback = of, callback
        self.value: Any = None

    def traced_type(self) -> type:
        return GraphFuture

    def method(self, tx: Any, name: str, args: list[object], kwargs: dict[str, object]) -> Any:
        if name not in FUTURE_METHODS:
            _refuse(name)
        if name == "then":
            # Traced at the first wait, as eager runs it when the collective has ended and not
            # before.
            future = FutureVariable(self, *args, **kwargs)
            traced(tx).futures.append(future)
            return future
        value = self.end(tx)
        return dynamo_building.build(tx, True) if name == "done" else value

    def end(self, tx: Any) -> Any:
        """Trace what the future waits for, once; its value."""
        if self.value is None:
            before = self.of.end(tx)
            if self.callback is not None:
                traced(tx).futures.remove(self)
                self.value = self.callback.call_function(tx, [self.of], {})
            else:
                self.value = self.of.outputs if isinstance(self.of, WorkVariable) else before
        return self.value

    def reconstruct(self, codegen: PyCodegen) -> None:
        if self.callback is not None:
            dynamo_building.graph_break(
                "A callback on a collective's future leaves the graph",
                "Future.then",
                "The callback would run outside the compiled function.",
                "Wait for the future inside: value = work.get_future().then(callback).wait()",
            )
        dynamo_calls.construct_on_return(codegen, GraphFuture, [self.of])


def _refuse(name: str) -> None:
    dynamo_building.graph_break(
        "Attribute of a Work or its future that is not traced",
        name,
        "It tells of the backend's own object, which exists only when the graph runs.",
        "Use work.wait(), or call it outside the compiled function.",
    )


def traced_start(
    tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """``work.start`` while tracing."""
    finish, started, outputs = args
    started = dynamo_building.build_list(tx, dynamo_building.items_of(tx, started))
    outputs = dynamo_building.build_list(tx, dynamo_building.items_of(tx, outputs))
    work = WorkVariable(
        finish.as_python_constant(),
        started,
        outputs,
        dynamo_building.fake_tensors(tx, outputs),
        dynamo_calls.traced_user_line(tx, _OURS),
    )
    traced(tx).works.append(work)
    return work


def traced_wait_tensor(
    tx: object, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    """``wait_tensor`` of a buffer in flight ends its launch; None for anything else."""
    state = traced(tx)
    tensors = [*args, *kwargs.values()]
    # Functional collectives of the program itself are upstream's.
    if not state.works or len(tensors) != 1:
        return None
    buffer = dynamo_building.fake_tensor(tensors[0])
    found = [
        work
        for work in state.works
        if any(dtensor_specs.may_overlap(buffer, b) for b in work.buffers)
    ]
    # A buffer may be part of several launches, such as slices of one tensor.
    for work in found:
        work.end(tx)
    return tensors[0] if found else None


class EagerWorkVariable(InFlightVariable):
    """A Work launched outside. It is waited for before the graph runs, which its results allow."""

    def traced_type(self) -> type:
        return dist.Work

    def method(self, tx: Any, name: str, args: list[object], kwargs: dict[str, object]) -> Any:
        if name not in _GIVES_TRUE | _GIVES_NONE:
            _refuse(name)
        # The wait is moved before the graph, past the launch: the order of launches would change on
        # this rank.
        if traced(tx).has_launched:
            dynamo_building.graph_break(
                "Wait for a Work of an earlier launch after a launch in the graph",
                f"Work.{name}",
                "Such a wait runs before the graph. Peers may need this graph's launch first, and "
                "would wait for ever.",
                "Call work.wait() before the first collective of the compiled function.",
            )
        dynamo_calls.call_before_graph(tx, self.source, "wait")
        return dynamo_building.build(tx, True if name in _GIVES_TRUE else None)


def from_outside(tx: object, value: object, source: Source) -> VariableTracker:
    """The tracker of a Work that is an argument, an attribute or an item of something."""
    dynamo_guards.guard_source(source, _IS_WORK)
    return EagerWorkVariable(source=source)


def _is_work(value: object) -> bool:
    return isinstance(value, dist.Work)


_IS_WORK = dynamo_guards.value_guard("being a Work", _is_work)


def in_flight(state: Traced) -> list[tuple[torch.Tensor, WorkVariable]]:
    """The buffers that launches of this trace have yet to fill."""
    return [(buffer, work) for work in state.works for buffer in work.buffers]


def used_in_flight(tx: Any, work: WorkVariable) -> None:
    """Refuse the use of a buffer before its Work is waited for."""
    raise InFlightError(
        f"{dynamo_calls.traced_user_line(tx, _OURS)} uses a buffer of the collective launched at "
        f"{work.line}, which is in flight.",
        "Before its Work is waited for, what the buffer holds is undefined.",
        "Call .wait() on the Work first.",
    )


def before_end(tx: object) -> None:
    """Wait at the graph's end for every Work that nobody can wait for any more."""
    state = traced(tx)
    # A Work that the program still holds, or returns, may be waited for after the graph.
    alive = dynamo_calls.trackers_in_use(tx) if state.works or state.futures else set()
    found: list[FutureVariable | WorkVariable] = [*state.futures, *state.works]
    for unfinished in found:
        done = (
            unfinished.value is not None
            if isinstance(unfinished, FutureVariable)
            else unfinished.done
        )
        if done or id(unfinished) in alive:
            continue
        if isinstance(unfinished, WorkVariable):
            log.warning(
                "%s: the Work of this collective is never waited for, so it is waited for at the "
                "end of the graph. Call .wait() on it where its result is needed.",
                unfinished.line,
            )
        unfinished.end(tx)


def after_end(tx: object) -> None:
    """Make sure that no launch was lost: each was waited for, or its Work left the graph."""
    for work in traced(tx).works:
        if not work.left:
            raise InFlightError(
                f"The Work of the collective launched at {work.line} was lost.",
                "It was launched inside a checkpointed or autograd function and outlived it.",
                "Call .wait() on the Work inside that function.",
            )


def patches() -> list[Patch]:
    """List the patches that enabling makes for work in flight."""
    return [
        *dynamo_trackers.on_values(dist.Work, _is_work, from_outside),
        *dynamo_calls.on_graph_end(before_end, after_end),
        *dynamo_building.on_tensor_uses(in_flight, used_in_flight),
    ]
