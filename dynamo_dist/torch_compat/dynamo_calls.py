"""Functions and objects that Dynamo traces as ours, ends of graphs, and ``torch.autograd.grad``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.variables.torch as _torch_variables
from torch import fx
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_call_method,
    create_instruction,
)
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import (
    AutogradGradRestartAnalysis,
    TorchRuntimeError,
    UnspecializeRestartAnalysis,
)
from torch._dynamo.output_graph import OutputGraph, collect_reachable_grad_fns
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.dtensor_dispatch import tree_leaves
from dynamo_dist.torch_compat.dynamo_building import fake_tensor, realized
from dynamo_dist.torch_compat.patching import ConfigDefault, Patch, Upstream, WrapFunction

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

# What torch raises where a call is an error on what a graph knows of its arguments.
CannotTrace = TorchRuntimeError


def is_asked_for() -> bool:
    """Return whether the user set torch to trace gradients."""
    return bool(_dynamo_config.trace_autograd_ops)


_GRADIENTS = "_dynamo_dist_gradients"  # of what Dynamo keeps while it starts over


def computes_gradients(tx: InstructionTranslatorBase) -> bool:
    """Return whether the graph will compute the gradients of what it traces, as far as is known."""
    return is_asked_for() or _expected(tx)


def _expected(tx: InstructionTranslatorBase) -> bool:
    """Return what a trace before this one has shown; in the first one, whether the compiled
    function names a backward, so that most steps are traced once.
    """
    names_backward = is_our_backend(tx) and "backward" in tx.output.root_tx.f_code.co_names
    return bool(getattr(tx.speculation_log, _GRADIENTS, names_backward))


def expect_gradients(tx: InstructionTranslatorBase) -> None:
    """Trace anew with the knowledge that the graph computes gradients, unless it is expected, or a
    trace before this one has shown that it does not.
    """
    if not computes_gradients(tx) and not hasattr(tx.speculation_log, _GRADIENTS):
        setattr(tx.speculation_log, _GRADIENTS, True)
        raise UnspecializeRestartAnalysis(restart_reason="dynamo_dist")


def expect_no_gradients(tx: InstructionTranslatorBase) -> None:
    """Know from here on that the graph ends before the gradients; Dynamo has to trace it anew."""
    setattr(tx.speculation_log, _GRADIENTS, False)


def rules_out_gradients(tx: InstructionTranslatorBase) -> bool:
    """Return whether a trace before this one has shown that the graph ends before the gradients."""
    return not getattr(tx.speculation_log, _GRADIENTS, True)


def lacks_gradients(tx: InstructionTranslatorBase) -> bool:
    """Return whether the graph ends without the gradients that were expected."""
    return _expected(tx) and not holds_backward(tx)


def traced_gradients(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """Trace the call into the graph, as ``trace_autograd_ops`` asks; raises CannotTrace."""
    with _dynamo_config.patch(trace_autograd_ops=True):
        return TorchInGraphFunctionVariable(torch.autograd.grad).call_function(tx, args, kwargs)


BACKEND = "dynamo_dist"


def is_our_backend(tx: InstructionTranslatorBase) -> bool:
    """Return whether a program is traced for our backend, by its name."""
    return getattr(tx.output.compiler_fn, "_compiler_name", None) == BACKEND


def holds_backward(tx: InstructionTranslatorBase) -> bool:
    """Return whether the graph computes gradients, by ``backward`` or ``torch.autograd.grad``."""
    return bool(tx.output.autograd_grad_consumed_grad_fns)


def tensor_inputs(tx: InstructionTranslatorBase) -> Iterator[Any]:
    """The trackers of the tensors from outside that the graph uses so far, each once.

    An optimizer's parameters are attributes of the graph, not inputs, where the program asks the
    optimizer for them first.
    """
    inputs = tx.output.input_source_to_var.values()
    attributes = tx.output.side_effects.id_to_variable.values()
    for tracker in {id(each): each for each in (*inputs, *attributes)}.values():
        if isinstance(tracker, TensorVariable) and tracker.source is not None:
            yield tracker


def real_tensor(tx: Any, tracker: Any) -> Any:
    """The tensor that an input stands for in the call that is traced; no guard is installed."""
    return tx.output.resolve_source_value(tracker.source)


def has_history_from_outside(tx: InstructionTranslatorBase, tensor: Any) -> bool:
    """Return whether what autograd recorded of a tensor leads to a tensor from outside of the graph
    that is no leaf.
    """
    reached = collect_reachable_grad_fns([(fake_tensor(tensor), None)])
    histories = (fake_tensor(each).grad_fn for each in tensor_inputs(tx))
    return any(each in reached for each in histories if each is not None)


def uses_with_gradient(tracker: Any) -> Iterator[Any]:
    """The operations that compute something with a history from a tensor, since the graph's last
    backward, which has used up the histories before it.
    """
    node = tracker.as_proxy().node
    # Nodes are compared by their place in the graph.
    backwards = node.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    last = max(backwards, default=None)
    for user in node.users:
        since = last is None or user > last
        if since and _has_history(user) and not _writes(user, node):
            yield user.target


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Return whether ``user`` is a method that writes to ``node``, as an optimizer's update."""
    target = user.target if user.op == "call_method" else ""
    return str(target).endswith("_") and user.args[0] is node


def _has_history(node: fx.Node) -> bool:
    values = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def history_of(tracker: Any) -> set[fx.Node]:
    """What a tensor was computed from with a history, in the graph so far."""
    found: set[fx.Node] = set()
    pending = [tracker.as_proxy().node]
    while pending:
        node = pending.pop()
        if node not in found and _has_history(node):
            found.add(node)
            pending += node.all_input_nodes
    return found


def tensors_among(*trackers: Any) -> Iterator[Any]:
    """The trackers of tensors among arguments: tensors, or lists, tuples and dictionaries of
    some.
    """
    for tracker in map(realized, trackers):
        if isinstance(tracker, TensorVariable):
            yield tracker
        elif isinstance(tracker, ConstDictVariable):
            yield from tensors_among(*tracker.items.values())
        elif isinstance(tracker, BaseListVariable):
            yield from tensors_among(*tracker.items)


def is_dtensor(tracker: VariableTracker) -> bool:
    """Return whether a tensor's tracker stands for a DTensor."""
    return isinstance(fake_tensor(tracker), DTensor)


def see_histories_of_subclasses() -> list[Patch]:
    """Find what autograd recorded of tensors that are made of others, where a gradient is traced.

    Torch looks at the inner tensors of a graph's inputs alone, which have no history, and at
    results only if they are plain. Seen in 2.13 to 2.15.
    """

    def collect(upstream: Upstream, tensor: torch.Tensor) -> object:
        own = (tensor.grad_fn, tensor._base.grad_fn if tensor._base is not None else None)
        return {*upstream(tensor), *(each for each in own if each is not None)}

    def validate(upstream: Upstream, self: Any, results: list[Any], tx: Any) -> None:
        consumed = self.autograd_grad_consumed_grad_fns
        others = []
        for each in results:
            if not consumed or not _has_gradient(each):
                continue
            nodes = collect_reachable_grad_fns([(fake_tensor(each), None)]) & consumed
            if any(map(_is_freed, nodes)):
                _detach(self, each)
            elif not is_dtensor(each):
                others.append(each)
            elif nodes:
                tx.speculation_log.autograd_grad_leaked_tensors.append(each.proxy.node.name)
                tx.speculation_log.graph_break_on_autograd_grad = True
                raise AutogradGradRestartAnalysis(restart_reason="dynamo_dist")
        upstream(self, others, tx)

    return [
        WrapFunction(_torch_variables, "_collect_all_grad_fns", collect),
        WrapFunction(OutputGraph, "_validate_outputs_safe_for_autograd_nodes", validate),
    ]


def _has_gradient(tracker: VariableTracker) -> bool:
    return isinstance(tracker, TensorVariable) and tracker.requires_grad


def _is_freed(node: Any) -> bool:
    """Return whether a backward has freed what the node saved, so that eager would refuse another.

    A history that saved nothing, such as a sum's, can be gone through again.
    """
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError:  # what autograd raises for a tensor that it has freed
                return True
    return False


def _detach(output: OutputGraph, result: Any) -> None:
    """Return a result without its history: a backward in the graph has used that up."""
    value = fake_tensor(result).detach()
    result.proxy = output.create_proxy("call_method", "detach", (result.proxy,), {})
    result.proxy.node.meta["example_value"] = value
    result.requires_grad = result.has_grad_fn = False


CALL = invoke_subgraph_placeholder


class Members:
    """Stands before an upstream tracker in the bases: members are the subclass's hooks alone."""

    def attribute(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of an attribute, bound methods included."""
        raise NotImplementedError

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Hook: the result of a method call."""
        raise NotImplementedError

    def var_getattr(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.method(tx, name, list(args), kwargs)


class ObjectTracker(Members, BackwardHookVariable):
    """An object that exists while tracing only; its way out is the subclass's hook, too.

    It is true: upstream's hooks are a class that no table holds and every condition takes.
    """

    def __init__(self, **options: Any) -> None:
        VariableTracker.__init__(self, **options)

    def as_proxy(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is no value of a graph")

    def traced_type(self) -> type:
        """Hook: what ``type()`` gives."""
        raise NotImplementedError

    def python_type(self) -> type:
        return self.traced_type()

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.traced_type(), name))

    def is_python_equal(self, other: object) -> bool:
        return self is other


def construct_on_return(codegen: Any, cls: type, args: list[Any]) -> None:
    """Make ``cls(*args)`` when the compiled function returns; a function in ``args`` is
    imported.
    """
    codegen.add_push_null(lambda: codegen.load_import_from(cls.__module__, cls.__name__))
    for arg in args:
        if inspect.isfunction(arg):
            codegen.load_import_from(arg.__module__, arg.__name__)
        else:
            codegen(arg)
    codegen.extend_output(create_call_function(len(args), False))


def call_before_graph(tx: Any, source: Any, call: str | Callable[[Any], None]) -> None:
    """Call ``source.call()``, or an importable ``call(source)``, when the compiled function starts.

    Each time, before its graph and after its guards.
    """
    codegen = PyCodegen(tx.output.root_tx)
    if isinstance(call, str):
        codegen(source)
        codegen.load_method(call)
        codegen.extend_output(create_call_method(0))
    else:
        module, name = call.__module__, call.__name__
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, "run_eagerly"))
        codegen.load_import_from(module, name)
        codegen(source)
        codegen.extend_output(create_call_function(2, False))
    codegen.append_output(create_instruction("POP_TOP"))
    tx.output.pregraph_bytecode.extend(codegen.get_instructions())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(call: Callable[[object], None], value: object) -> None:
    """Call a function with Dynamo off, for it and for what it calls."""
    call(value)


def trace_state(
    tx: InstructionTranslatorBase, make: Callable[[], object], name: str = "_dynamo_dist"
) -> Any:
    """Return the state of that name that we keep for one trace; made anew when Dynamo starts
    over.
    """
    state = vars(tx.output).get(name)
    if state is None:
        state = make()
        setattr(tx.output, name, state)
    return state


def current_tracer(tx: InstructionTranslatorBase) -> Any:
    """The graph that is traced right now: the function's, or one inside of it."""
    return tx.output.current_tracer


def open_tracers(tx: InstructionTranslatorBase) -> Sequence[Any]:
    """The graphs that are traced right now, each inside of the one before. ``tracers`` was seen in
    2.13 to 2.15.
    """
    return tx.output.tracers


@contextlib.contextmanager
def traced_into(tx: InstructionTranslatorBase, tracer: Any) -> Iterator[None]:
    """Put what is traced now into a graph that holds the current one. ``tracers`` was seen in 2.13
    to 2.15.
    """
    tracers = tx.output.tracers
    inner = tracers[tracers.index(tracer) + 1 :]
    del tracers[len(tracers) - len(inner) :]
    try:
        yield
    finally:
        tracers.extend(inner)


def is_subclass_instance(tracker: Any) -> bool:
    """Return whether it tracks a tensor of a class that may answer c10d calls itself, such as
    DTensor.
    """
    tracker = realized(tracker)
    if not isinstance(tracker, TensorVariable):
        return False
    return tracker.python_type() not in (torch.Tensor, torch.nn.Parameter)


def traced_user_line(tx: InstructionTranslatorBase, ours: str) -> str:
    """``file:line in function`` of the innermost traced frame outside the folder ``ours``."""
    frame = tx
    while frame is not None:
        if not frame.f_code.co_filename.startswith(ours) or frame.parent is None:
            break
        frame = frame.parent
    return f"{frame.f_code.co_filename}:{frame.lineno} in {frame.f_code.co_name}"


def trackers_in_use(tx: Any) -> set[int]:
    """Ids of the trackers that the code after this point, or the caller, can still reach."""
    found: set[int] = set()
    cache: dict[int, object] = {}
    effects, frame = tx.output.side_effects, tx
    roots: list[Any] = []
    while frame is not None:
        frame.prune_dead_locals()
        roots += [frame.stack, dict(frame.symbolic_locals)]
        frame = frame.parent
    effects.prune_dead_object_new(tx)
    roots += [dict(effects.id_to_variable), list(effects.store_attr_mutations)]
    roots += [dict(values) for values in effects.store_attr_mutations.values()]
    for root in roots:
        VariableTracker.visit(lambda each: found.add(id(each)), root, cache)
    return found


def on_graph_end(before: Callable[[Any], None], after: Callable[[Any], None]) -> list[Patch]:
    """Call ``before(tx)`` and ``after(tx)`` around the end of a graph, at a return or a graph
    break.
    """

    def compile_subgraph(
        upstream: Upstream, self: Any, tx: Any, *args: Any, **kwargs: Any
    ) -> object:
        if "_dynamo_dist" not in vars(self):
            return upstream(self, tx, *args, **kwargs)
        before(tx)
        result = upstream(self, tx, *args, **kwargs)
        after(tx)
        return result

    return [WrapFunction(OutputGraph, "compile_subgraph", compile_subgraph)]


def on_end(starts_over: Callable[[Any, bool], bool]) -> list[Patch]:
    """Call ``starts_over(tx, breaks)`` as a graph ends, at a return or a break; if it says so,
    trace anew.
    """

    def compile_subgraph(
        upstream: Upstream,
        self: object,
        tx: Any,
        reason: Any,
        *args: object,
        **kwargs: object,
    ) -> object:
        if starts_over(tx, reason.graph_break):
            raise UnspecializeRestartAnalysis(restart_reason="dynamo_dist")
        return upstream(self, tx, reason, *args, **kwargs)

    return [WrapFunction(OutputGraph, "compile_subgraph", compile_subgraph)]


def forget_in_dictionaries(tx: InstructionTranslatorBase, values: set[int]) -> None:
    """Leave no tracker of these ids in a dictionary that outlives the graph: what was there
    before stays.
    """
    for tracker in list(tx.output.side_effects.id_to_variable.values()):
        if not isinstance(tracker, ConstDictVariable) or tracker.source is None:
            continue
        for key, value in list(tracker.items.items()):
            # What nobody has read so far is none of them, and stays unread.
            is_unread = isinstance(value, LazyVariableTracker) and not value.is_realized()
            if not is_unread and id(realized(value)) in values:
                del tracker.items[key]
                if key in tracker.original_items:
                    tracker.items[key] = tracker.original_items[key]


def allow_point_to_point() -> list[Patch]:
    """Let upstream construct ``P2POp`` while tracing."""
    return [ConfigDefault(_dynamo_config, "enable_p2p_compilation", True)]
