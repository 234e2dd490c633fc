"""AOTAutograd's backward: gradients that a graph returns, their accumulation, and a second
backward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo  # first: runtime_wrappers imports it in a circle otherwise
import torch._functorch._aot_autograd.graph_capture_wrappers as _graph_capture_wrappers
import torch.autograd.graph as _autograd_graph
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper
from torch._ops import OpOverload
from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._op_schema import OutputSharding
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.torch_compat.aot_runtime import Wrap
from dynamo_dist.torch_compat.dtensor_dispatch import (
    dispatcher,
    plain_tensors_are_replicas,
    tree_leaves,
    tree_map_only,
)
from dynamo_dist.torch_compat.dtensor_strategies import _CloneOfParts
from dynamo_dist.torch_compat.patching import (
    Patch,
    SetAttribute,
    Upstream,
    WrapAttribute,
    WrapFunction,
    _optional_module,
    has,
)


class _ReplicasOfAnySize(TorchDispatchMode):
    """Turn plain tensors among DTensors into replicas: torch's C++ asks for their sizes as numbers.

    Seen in 2.13 to 2.15, where the backward of a split with only one used part fails with dynamic
    sizes.
    """

    # Else torch refuses those under any mode, whatever they are called with.
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        if not isinstance(func, OpOverload):  # It calls operators itself, and may take functions.
            return func(*given[0], **given[1])
        meshes = [each.device_mesh for each in tree_leaves(given) if isinstance(each, DTensor)]

        def replica(value: torch.Tensor) -> torch.Tensor:
            # A size that is a number is handled by torch's C++, which makes the replica faster.
            if isinstance(value, DTensor) or isinstance(value.numel(), int):
                return value
            # The mesh of any DTensor of the call: with two meshes the operator is refused later, by
            # its strategy.
            placements = [Replicate()] * meshes[0].ndim
            return DTensor.from_local(value, meshes[0], placements, run_check=False)

        # What has a handler of its own, as the losses of loss_parallel, takes plain tensors as they
        # are.
        if meshes and func not in dispatcher()._custom_op_handlers:
            given = tree_map_only(torch.Tensor, replica, given)
        return func(*given[0], **given[1])


def replicas_in_backward() -> list[Patch]:
    """Let autograd's own formulas mix tensors that they make with the DTensors they are given.

    Formulas such as that of ``cummax`` start from zeros of the global shape, which are the same on
    every rank. Seen in 2.13 to 2.15, where two modules name the engine's entry.
    """
    upstream = _autograd_graph._engine_run_backward

    # Every backward of every program passes here: without a group there is no mesh, and so no
    # DTensor.
    @functools.wraps(upstream)
    def run(*args: Any, **kwargs: Any) -> object:
        # As cheap as a check can be, for programs that use no torch.distributed at all.
        if not is_initialized():
            return upstream(*args, **kwargs)
        mode = get_proxy_mode()
        with plain_tensors_are_replicas():
            # No mode where every size is a number: what looks for modes takes another way with any.
            if mode is None or not mode.tracer.sympy_expr_tracker:
                return upstream(*args, **kwargs)
            with _ReplicasOfAnySize():
                return upstream(*args, **kwargs)

    return [
        SetAttribute(module, upstream.__name__, run)
        for module in (_autograd_graph, torch.autograd)
        # Somebody else may have wrapped one of the two; that one is left to them.
        if getattr(module, upstream.__name__, None) is upstream
    ]


def on_writes_to_plain_tensors(write: Callable[..., object]) -> list[Patch]:
    """Have ``write(op, args, kwargs)`` do what writes DTensors to a plain tensor, the first
    argument.

    Torch computes it, and then does not know what to return. Its C++ looks up once for all time
    what finishes a call, so this stands where a decision is asked for. Seen in 2.13 to 2.15.
    """

    def propagate(
        upstream: Upstream,
        self: object,
        op: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *rest: object,
    ) -> object:
        # It refuses plain tensors where they may not stand.
        found = upstream(self, op, args, kwargs, *rest)
        plain = args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor)
        if not plain or not op._schema.name.endswith("_") or not isinstance(found, OutputSharding):
            return found
        write(op, args, kwargs)
        # The dispatcher returns a result that is no decision as it is: what an operator gives that
        # writes in place.
        return args[0]

    name = "_propagate_op_sharding_dispatch_slow_path"
    return [WrapFunction(OpDispatcher, name, propagate)]


def partial_inputs_stay_partial() -> list[Patch]:
    """Have AOTAutograd copy the parts of an input that a program to be trained changes in place.

    Its own ``clone()`` ends what is pending, as it does for users, and the graph then takes the
    whole for the parts that it said it would return. Seen in 2.13 to 2.15.
    """

    def fresh(upstream: Upstream, index: int, tensor: torch.Tensor, meta: Any) -> object:
        info = meta.input_info[index] if index in meta.mutated_inp_runtime_indices else None
        if (
            info is not None
            and info.requires_grad
            and info.mutates_data
            and isinstance(tensor, DTensor)
            and any(isinstance(each, Partial) for each in tensor.placements)
        ):
            return _CloneOfParts.apply(tensor)
        return upstream(index, tensor, meta)

    return [WrapFunction(_graph_capture_wrappers, "maybe_to_fresh_input", fresh)]


def on_double_backward(refuse: Callable[[], None]) -> list[Patch]:
    """Call ``refuse()`` when a compiled backward that returns DTensors runs with
    ``create_graph=True``.

    Torch wraps those results without autograd's knowledge. A second gradient stops there, and the
    terms from beyond are missing, silently where other terms have one. Of plain tensors torch
    raises an error itself.

    The check is part of the backward of such a graph, so autograd does nothing more anywhere else.
    ``RuntimeWrapper.post_compile`` gets the graph's ``autograd.Function.apply``, from a cache too.
    Seen in 2.13 to 2.15.
    """

    def post_compile(
        upstream: Upstream,
        self: object,
        compiled_fn: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        # compiled_fn is the bound classmethod ``apply`` of the graph's autograd.Function.
        function = getattr(compiled_fn, "__self__", None)
        if isinstance(function, type) and _returns_dtensors(function):
            compiled: Any = function
            compiled.backward = _checking(compiled.backward, refuse)
        return upstream(self, compiled_fn, *args, **kwargs)

    return [WrapFunction(RuntimeWrapper, "post_compile", post_compile)]


def _returns_dtensors(function: type) -> bool:
    """Return whether the backward of a compiled graph makes DTensors of what it computes."""
    made = getattr(function, "maybe_subclass_metadata", None)
    metas = getattr(made, "grad_input_metas", None) or ()
    return any(
        isinstance(kind, type) and issubclass(kind, DTensor)
        for each in metas
        # The tensor that was traced with, or its type once the graph is ready to run.
        for kind in (
            getattr(each, "original_subclass_type", None),
            type(getattr(each, "original_subclass", None)),
        )
    )


def _checking(
    backward: Callable[..., object], refuse: Callable[[], None]
) -> staticmethod[..., object]:
    @functools.wraps(backward)
    def run(ctx: object, *gradients: object) -> object:
        # Nothing else is asked: a check of the gradients would cost each backward.
        if torch.is_grad_enabled():  # The engine runs nodes so where it is to create a graph.
            refuse()
        return backward(ctx, *gradients)

    return staticmethod(run)


_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)
_hook_owner: Any = getattr(torch.autograd.function, "_HookMixin", None)
# Inside it, attributes of a DTensor are read as fast as a tensor's: it has no
# ``__torch_function__`` to ask.
plain_attributes: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


class WrappedGradient(NamedTuple):
    """A gradient that is a DTensor: its place among the inputs, those of its parts among the
    outputs.
    """

    position: int
    local: int
    mesh: int
    meta: Any

    def unflatten(self, local: torch.Tensor, mesh: object) -> DTensor:
        """The DTensor, as upstream makes it."""
        inner = {"_local_tensor": local, "device_mesh": mesh}
        size, stride = torch.Size(self.meta.outer_size), tuple(self.meta.outer_stride)
        return DTensor.__tensor_unflatten__(inner, self.meta.meta, size, stride)


class GradientLayout(NamedTuple):
    """Targets of a backward graph's outputs: number of ``inputs``, those that get a tensor as it
    is, and DTensors.
    """

    inputs: int
    plain: tuple[tuple[int, int], ...]
    wrapped: tuple[WrappedGradient, ...]


def wrap_gradients(make: Callable[[Wrap, GradientLayout], Wrap]) -> list[Patch]:
    """``make(upstream, layout)`` stands for the function that turns a backward's outputs into
    gradients.

    Empty where this torch has no such function, or lacks what ``make`` needs to tell that nobody
    looks at a gradient. ``codegen_backward_subclass_fns`` was seen in 2.13 to 2.15.
    """
    owner = _optional_module("torch._functorch._aot_autograd.subclass_codegen")
    nodes = "_current_autograd_node", "_will_engine_execute_node"
    off = "gradients of DTensors are wrapped and added one by one, which takes longer"
    if not (
        has(owner, "codegen_backward_subclass_fns", off=off)
        and has(torch._C, *nodes, off=off)
        and has(torch._C._functions, "AccumulateGrad", off=off)
        and has(_hook_owner, "_register_hook", off=off)
    ):
        return []

    def wrapped(upstream: Any) -> Any:
        def build(grad_input_metas: Any = None) -> Any:
            unwrap, wrap = upstream(grad_input_metas)
            layout = None if wrap is None else _layout(grad_input_metas)
            return unwrap, wrap if layout is None else make(wrap, layout)

        return build

    return [
        WrapAttribute(owner, "codegen_backward_subclass_fns", wrapped),
        SetAttribute(_hook_owner, "_register_hook", staticmethod(_register_or_report)),
    ]


def _layout(metas: Sequence[Any]) -> GradientLayout | None:
    """None unless every gradient is a tensor or a DTensor of known size."""
    plain, wrapped, at = [], [], 0
    for position, meta in enumerate(metas):
        attrs = getattr(meta, "attrs", None)
        # A plain gradient: one output of the graph.
        if attrs is None:
            plain.append((position, meta.unwrapped_idx))
            at = max(at, meta.unwrapped_idx + 1)
            continue
        sizes = (*meta.outer_size, *meta.outer_stride)
        if (
            # A subclass of DTensor may flatten in another way; only DTensor's own two inner values
            # are known.
            meta.original_subclass_type is not DTensor
            or list(attrs) != ["_local_tensor", "device_mesh"]
            or any(hasattr(attr, "attrs") for attr in attrs.values())
            or not all(type(size) is int and size >= 0 for size in sizes)
        ):
            return None
        wrapped.append(WrappedGradient(position, at, at + 1, meta))
        # The local tensor and the mesh, both of which are outputs of the backward graph.
        at += 2
    return GradientLayout(len(metas), tuple(plain), tuple(wrapped)) if wrapped else None


def current_node() -> Any:
    """The autograd node that runs in this thread; None outside backward, or while disabled."""
    # Without our function there nothing can tell whether hooks are registered.
    if _hook_owner._register_hook is not _register_or_report:
        return None
    return torch._C._current_autograd_node()


def current_backward() -> int:
    """Autograd's number of the backward that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(call: Callable[[], None]) -> None:
    """Call once the backward that runs now is through, before ``backward()`` returns."""
    # The engine keeps such callbacks per backward, so nested and concurrent backwards do not mix.
    torch.autograd.Variable._execution_engine.queue_callback(call)


def leaves_of(targets: Sequence[Any]) -> list[Any]:
    """The DTensor for which each autograd node accumulates; None if it is no such node or hooks
    are on it.
    """
    leaves: list[Any] = []
    for target in targets:
        leaf = target.variable if type(target) is _AccumulateGrad else None
        plain = (
            # Hooks of the parameter see its gradient before it is accumulated, so autograd has to
            # do that itself.
            type(leaf) is DTensor
            and not leaf._backward_hooks
            and not leaf._post_accumulate_grad_hooks
        )
        leaves.append(leaf if plain else None)
    return leaves


_variable = operator.attrgetter("variable")
_tensor_hooks = operator.attrgetter("_backward_hooks")
_after_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
spec_of = operator.attrgetter("_spec")
local_of = operator.attrgetter("_local_tensor")


def all_leaves_of(targets: Sequence[object]) -> list[Any] | None:
    """``leaves_of`` without a Python frame or line for each; None if it would give a None."""
    if set(map(type, targets)) != {_AccumulateGrad}:
        return None
    leaves = list(map(_variable, targets))
    if set(map(type, leaves)) != {DTensor}:
        return None
    hooked = any(map(_tensor_hooks, leaves)) or any(map(_after_hooks, leaves))
    return None if hooked else leaves


def all_will_run(nodes: Sequence[Any]) -> bool:
    """Return whether this backward runs the accumulators, and not ``torch.autograd.grad`` for
    their inputs.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


class _HooksReported(Exception):
    pass


_ASK = object()
_upstream_register_hook: Any = getattr(_hook_owner, "_register_hook", None)


def _register_or_report(hooks: Any, hook: object) -> object:
    """Upstream's way to add ``hook`` to those of a node, or to tell which there are."""
    if hook is _ASK:
        # An exception, because the node's method would use a returned value as a handle.
        raise _HooksReported(bool(hooks))
    return _upstream_register_hook(hooks, hook)


def has_hooks(node: Any) -> bool:
    """Return whether hooks from Python are on an autograd node, which does not say; nothing is
    registered.
    """
    for register in (node.register_hook, node.register_prehook):
        try:
            register(_ASK)
        except _HooksReported as reported:
            if reported.args[0]:
                return True
    return False
