"""DTensors while tracing, and sizes of views of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.guards as _guards
import torch._dynamo.output_graph as _output_graph
import torch._dynamo.variables.builder as _builder
import torch.distributed.device_mesh as _device_mesh
from torch._dynamo.output_graph import OutputGraph, SubgraphTracer
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.utils import proxy_args_kwargs as _proxy_args_kwargs
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import GraphArg
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynamo_dist.torch_compat.dynamo_building import fake_tensor, realized
from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._guards import Guard, Source


def sizes_of_bases_are_inputs() -> list[Patch]:
    """With dynamic sizes, a graph takes the sizes of a view's base where those of the view are made
    of several.

    A view of a DTensor comes in as its base and what was done to that, so that ``x.view(-1)`` has
    the product of two sizes that are no sizes of it; Dynamo asserts that each is one. Seen in torch
    2.13 to 2.15.
    """

    def lift(upstream: Upstream, self: Any, value: Any, source: Source) -> None:
        if self.parent is None and isinstance(value, torch.Tensor):
            for number in _numbers(value):
                _bind_each(self, number)
        upstream(self, value, source)

    def free_symbols(upstream: Upstream, value: Any) -> object:
        found = upstream(value)
        if is_traceable_wrapper_subclass(value):
            inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            tensors = [each for each in inner if isinstance(each, torch.Tensor)]
            symbols = [
                number.node.expr.free_symbols for each in tensors for number in _numbers(each)
            ]
            found = {*found, *itertools.chain(*symbols)}
        return found

    return [
        WrapFunction(SubgraphTracer, "_lift_basic_symbols", lift),
        # By which inputs are dropped that nobody reads.
        WrapFunction(_output_graph, "free_symbols", free_symbols),
    ]


def _numbers(tensor: torch.Tensor) -> Iterator[torch.SymInt]:
    strided = tensor.layout is torch.strided
    found = (*tensor.size(), *(tensor.stride() if strided else ()))
    for number in (*found, tensor.storage_offset()) if strided else found:
        if isinstance(number, torch.SymInt) and not number.node.expr.is_symbol:
            yield number


def _bind_each(tracer: Any, number: torch.SymInt) -> None:
    shape_env = number.node.shape_env
    for symbol in sorted(tracer.lookup_unbound_symbols(number), key=str):
        sources = shape_env.var_to_sources.get(symbol)
        if not sources:
            continue
        hint = shape_env.backed_var_to_val[symbol]
        size = shape_env.create_symintnode(symbol, hint=int(hint), source=sources[0])
        node = tracer.create_graph_input(
            str(symbol), type(size), size, before=True, source=sources[0]
        ).node
        node.meta["grapharg"] = GraphArg(
            sources[0], size, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False
        )


def current_mesh() -> object:
    """Traced: the mesh of the innermost ``with mesh:``; RuntimeError outside of any."""
    return _device_mesh._mesh_resources.get_current_mesh()


_ATTRIBUTE_METHODS = ("var_getattr", "tp_getattro_impl")  # the second from 2.14 on


def on_tensor_attributes(
    has_attribute: Callable[[Any, type, str], bool | None],
    attribute: Callable[[Any, Any, str], Any],
) -> list[Patch]:
    """``hasattr(tensor, name)`` and ``tensor.name``, where our answer is not None.

    ``has_attribute(tracker, cls, name)`` is given the tensor's class, and ``attribute(tx, tracker,
    name)`` gives a tracker.
    """
    name = next(name for name in reversed(_ATTRIBUTE_METHODS) if name in vars(TensorVariable))

    def call_obj_hasattr(
        upstream: Upstream, self: Any, tx: InstructionTranslatorBase, name: str
    ) -> object:
        found = has_attribute(self, type(fake_tensor(self)), name)
        return upstream(self, tx, name) if found is None else ConstantVariable.create(found)

    def getattr_(
        upstream: Upstream, self: object, tx: InstructionTranslatorBase, name: str
    ) -> object:
        found = attribute(tx, self, name)
        return upstream(self, tx, name) if found is None else found

    return [
        WrapFunction(TensorVariable, "call_obj_hasattr", call_obj_hasattr),
        WrapFunction(TensorVariable, name, getattr_),
    ]


def dtensor_state(tx: InstructionTranslatorBase) -> dict[str, object]:
    """Return the state that the tracing of DTensor's contexts keeps for one graph; new when
    Dynamo starts over.
    """
    found: dict[str, Any] = vars(tx.output).setdefault("_dynamo_dist_dtensor", {})
    return found


MODULE_HOOK = "module backward hook"
_HOOK_GRAPHS = (MODULE_HOOK, "register_hook")  # as the tracer of a hook's graph is described


def is_in_backward_hook(tx: InstructionTranslatorBase) -> bool:
    """Return whether what is traced here is a hook: its gradients are examples, laid out as the
    forward's values.
    """
    return tx.output.current_tracer.description in _HOOK_GRAPHS


def is_tensor_of(tracker: Any, cls: type) -> bool:
    """Return whether it tracks a tensor of this class."""
    tracker = realized(tracker)
    return isinstance(tracker, TensorVariable) and isinstance(fake_tensor(tracker), cls)


def holds_tensor_of(tracker: Any, cls: type) -> bool:
    """Return whether it tracks a tensor of this class, or a collection that holds one."""
    return any(isinstance(each, cls) for each in _tensors_of(tracker))


def holds_gradients(tracker: Any) -> bool:
    """Return whether it tracks a tensor that requires gradients, or a collection that holds one."""
    return any(each.requires_grad for each in _tensors_of(tracker))


def _tensors_of(tracker: VariableTracker) -> list[Any]:
    found: list[Any] = []
    VariableTracker.visit(lambda each: found.append(realized(each)), tracker)
    return [fake_tensor(each) for each in found if isinstance(each, TensorVariable)]


def requires_grad(tracker: VariableTracker) -> bool:
    """Return whether the tracked tensor requires gradients."""
    return bool(fake_tensor(tracker).requires_grad)


def call_in_graph(
    tx: InstructionTranslatorBase,
    function: Callable[..., object],
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
) -> VariableTracker:
    """One node of the graph that calls a Python function of ours; AOTAutograd looks into it."""
    proxy_args, proxy_kwargs = _proxy_args_kwargs(
        [realized(arg) for arg in args], {name: realized(arg) for name, arg in kwargs.items()}
    )
    proxy = tx.output.create_proxy("call_function", function, proxy_args, proxy_kwargs)
    return _builder.wrap_fx_proxy(tx=tx, proxy=proxy)


def implicit_replication() -> bool:
    """Return whether plain tensors among DTensors count as replicated."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def set_implicit_replication(on: bool) -> None:
    """Turn that switch."""
    DTensor._op_dispatcher._allow_implicit_replication = on


def restore_implicit_replication(tx: InstructionTranslatorBase) -> None:
    """Have the switch be as it is now when Dynamo is done with the frame, or gives it up."""
    tx.output.add_cleanup_hook(functools.partial(set_implicit_replication, implicit_replication()))


def call_for_effect(
    tx: InstructionTranslatorBase, function: Callable[..., None], *args: object
) -> None:
    """Call ``function`` now, and in the graph."""
    tx.output.create_node("call_function", function, args, {})
    function(*args)


def keep_implicit_replication() -> list[Patch]:
    """The switch is as it was once a graph is compiled; a graph compiled while it was on asks for
    it.

    Without it the program is one that eager refuses.
    """

    def compile_subgraph(
        upstream: Upstream, self: object, *args: object, **kwargs: object
    ) -> object:
        on = implicit_replication()
        if on:
            _guards.install_guard(GlobalStateSource().make_guard(REPLICATES_IMPLICITLY))
        try:
            return upstream(self, *args, **kwargs)
        finally:
            set_implicit_replication(on)

    return [WrapFunction(OutputGraph, "compile_subgraph", compile_subgraph)]


def REPLICATES_IMPLICITLY(builder: Any, guard: Guard) -> None:
    """Guard: the switch is on."""
    code = _guards.get_verbose_code_parts("plain tensors count as replicated", guard)
    builder.guard_manager.root.add_lambda_guard(
        lambda _: implicit_replication(), code, guard.user_stack
    )
