"""For torch 2.11 and 2.12 alone: what later ones do by themselves.

Without them this file goes, and what calls it. Each change is none where it is not needed. Some cannot stand here, for
what this file imports needs it, or a user's program does; it goes then too:

- what asks ``HAS_OPAQUE_TYPES`` or ``TRACES_PLACEMENTS`` (``dynamo/opaque.py``), true from 2.12 on
- ``_REFUSES_SYMBOLIC_FACTORS`` (``dtensor/placements.py``), true from 2.13 on
- hashes and comparisons of trackers that later torches ask by other names (``dynamo/trackers.py``, ``dynamo/calls.py``)
- ``fake_group_fills_results`` (``testing.py``), true from 2.12 on
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.variables.higher_order_ops as _higher_order_ops
import torch._functorch._aot_autograd.runtime_wrappers as _runtime_wrappers
import torch._prims_common as _prims_common
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dynamo_dist.torch_compat.changes import Change, SetAttribute, SetItem, WrapAttribute
from dynamo_dist.torch_compat.dtensor.strategies import is_decided, on_dispatch
from dynamo_dist.torch_compat.dynamo.building import build, call_traced, realized
from dynamo_dist.torch_compat.dynamo.guards import guard_source
from dynamo_dist.torch_compat.dynamo.opaque import TRACES_PLACEMENTS
from dynamo_dist.torch_compat.dynamo.trackers import on_function

_partition_value: Any = vars(Partial)["_partition_value"]
_applied = _higher_order_ops.AutogradFunctionApplyVariable
# Dynamo returns from an autograd function what shares memory with its other results, which loses gradients.
RETURNS_ALIASES = hasattr(_applied, "_HOP_NAME") and "filter_aliased" not in inspect.getsource(
    _applied.trace_forward_graph
)


def return_no_aliases() -> list[Change]:
    """Let the forward of an autograd function return what it made once, not again by another name.

    Up to 2.11 every tensor it made is returned from it, what an in-place op gave too. That is the very
    tensor that the op wrote to; its gradients then go to the last of its names, and are lost. Later
    torches leave out what shares memory with an input or another output.
    """
    if not RETURNS_ALIASES:
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def collect(tx: Any, subtracer: Any, outputs: Any, *rest: Any) -> list[Any]:
            found: list[Any] = stock(tx, subtracer, outputs, *rest)
            if subtracer.source_target != _applied._HOP_NAME:
                return found
            value = "example_value"
            nodes = tx.output.graph.find_nodes(op="placeholder")
            nodes += [output.as_proxy().node for output in outputs]
            seen = {key for node in nodes for key in _storages(node.meta.get(value))}
            kept = []
            for tracker in found:
                keys = _storages(tracker.as_proxy().node.meta.get(value))
                if not keys & seen:
                    kept.append(tracker)
                    seen |= keys
            return kept

        return collect

    return [WrapAttribute(_higher_order_ops, "collect_intermediate_outputs", changed)]


def _storages(value: Any) -> set[Any]:
    """The storages of a tensor, those inside a subclass's wrapper too; none of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return set()
    if not is_traceable_wrapper_subclass(value):
        return {StorageWeakRef(value.untyped_storage())}
    names, _ = value.__tensor_flatten__()
    return {key for name in names for key in _storages(getattr(value, name))}


def on_text(classes: tuple[type, ...], create: Callable[..., None]) -> list[Change]:
    """``str(value)`` of values of these classes as a constant that ``create`` guards, where stock breaks.

    Up to 2.12 stock looks for a Python method; later torches ask the object's tracker.
    """
    if hasattr(VariableTracker, "str_impl") or hasattr(VariableTracker, "tp_str_impl"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call_str(self: Any, tx: Any, arg: Any) -> Any:
            tracker = realized(arg)
            value = getattr(tracker, "value", None)
            if not isinstance(value, classes):
                return stock(self, tx, arg)
            guard_source(tracker.source, create)
            return build(tx, str(value))

        return call_str

    return [WrapAttribute(BuiltinVariable, "call_str", changed), _ForgetHandlers()]


class _ForgetHandlers:
    """Drop what stock remembers of how builtins are traced, when a way is changed and changed back."""

    def apply(self) -> None:
        BuiltinVariable.call_function_handler_cache.clear()

    undo = apply


def on_full_tensor() -> list[Change]:
    """Trace ``full_tensor(grad_placements=...)`` where stock has no method for it, up to 2.11.

    Placements are no values of that stock's graphs.
    """
    if TRACES_PLACEMENTS:
        return []

    def method_full_tensor(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return call_traced(tx, _full_tensor, [self, *args], kwargs) if args or kwargs else None

    return [SetAttribute(TensorVariable, "method_full_tensor", method_full_tensor)]


def _full_tensor(tensor: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole.to_local(grad_placements=grad_placements)


def on_contiguous_strides() -> list[Change]:
    """Trace code of ours where ``zeros``, ``ones``, ``empty`` and ``full`` lay out a tensor of a given size.

    In torch's own Python for it stands what 2.11 refuses to trace; from 2.12 on it traces.
    """
    if TRACES_PLACEMENTS:
        return []
    return on_function(
        _prims_common.make_contiguous_strides_for,
        lambda tx, args, kwargs: call_traced(tx, _contiguous_strides, args, kwargs),
    )


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step = step * max(length, 1)
    return tuple(reversed(strides))


def can_partition(kind: type) -> bool:
    """Return whether ``partition_value`` traces for a placement of this class, a subclass of the user's too."""
    own: Any = getattr(kind, "_partition_value", None)
    return TRACES_PLACEMENTS or own is None or inspect.unwrap(own) is _partition_value


def partition_value(placement: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> torch.Tensor:
    """Traced: what this rank holds of ``tensor`` as a partial value."""
    if TRACES_PLACEMENTS:
        return placement._partition_value(tensor, mesh, mesh_dim)
    return _partition_value(placement, tensor, mesh, mesh_dim)


def refuse_moved_writes() -> list[Change]:
    """Have no strategy decide for an operator that would write to a redistributed copy of an argument.

    Up to 2.11 that is a decision like others: the copy is dropped for lists, and refused after the fact else.
    """
    if TRACES_PLACEMENTS:
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def propagate(self: Any, op: Any, args: Any, *rest: Any) -> Any:
            found = stock(self, op, args, *rest)
            if _moves_what_is_written(op, args, found):
                raise NotImplementedError(f"{op} would write to a copy")
            return found

        return propagate

    return [WrapAttribute(OpDispatcher, "_propagate_op_sharding_dispatch_slow_path", changed)]


def _moves_what_is_written(op: Any, args: Sequence[Any], found: object) -> bool:
    wanted = getattr(found, "redistribute_schema", None)
    return wanted is not None and any(
        [each._spec.placements for each in tree_leaves(now) if isinstance(each, DTensor)]
        != [each.placements for each in tree_leaves(then) if isinstance(each, DTensorSpec)]
        for argument, now, then in zip(op._schema.arguments, args, wanted.args_schema, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def on_detach() -> list[Change]:
    """``detach_`` of a DTensor, for which 2.11 decides nothing, and gathering would detach a copy."""
    op = torch.ops.aten.detach_.default
    return [] if is_decided(op) else on_dispatch(op, lambda op, args, kwargs: args[0])


def reduce_scatter_of(group: Any) -> Any:
    """The group's reduce-scatter of one tensor into one; renamed in 2.13."""
    return getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base


def on_alias_handlers(alias: Callable[..., Any]) -> list[Change]:
    """Have ``alias`` stand for ``gen_alias_from_base`` in compiled functions, after disable() too.

    Up to 2.12 their handlers look it up at every call; later it is bound to the code that is made for them.
    """
    if "gen_alias_from_base" in _runtime_wrappers._create_runtime_wrapper.__code__.co_names:
        return []

    def made(self: Any, inputs: list[Any], outputs: list[Any], out: Any) -> Any:
        if hasattr(self, "_unwrap_aliased_base_tensor"):
            base = self._unwrap_aliased_base_tensor(outputs[self.base_idx])
        else:
            base = inputs[self.base_idx]
        way, replays = self.view_meta_sequence, self.replay_views
        return alias(base, self.unwrap_out(out), self.requires_grad, way, replay_views=replays)

    table = _runtime_wrappers._HANDLER_MAP
    return [
        SetItem(table, kind, type(stock.__name__, (stock,), {"__call__": made}))
        for kind, stock in table.items()
        if "view_meta_sequence" in stock.__init__.__code__.co_names
    ]
