"""Autograd functions in a traced graph: results without aliases, and their contexts."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch._dynamo.variables.higher_order_ops as _higher_order_ops
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable
from torch._dynamo.variables.nn_module import NNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.autograd.function import _is_setup_context_defined
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def return_no_aliases() -> list[Change]:
    """Let the forward of an autograd function return what it made once, not again by another name.

    Up to 2.11 every tensor it made is returned from it, what an in-place op gave too. That is the very
    tensor that the op wrote to; its gradients then go to the last of its names, and are lost. Later
    torches leave out what shares memory with an input or another output.
    """
    owner = _higher_order_ops.AutogradFunctionApplyVariable
    name: Any = getattr(owner, "_HOP_NAME", None)
    if name is None or "filter_aliased" in inspect.getsource(owner.trace_forward_graph):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def collect(tx: Any, subtracer: Any, outputs: Any, *rest: Any) -> list[Any]:
            found: list[Any] = stock(tx, subtracer, outputs, *rest)
            if subtracer.source_target != name:
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


def pass_context() -> list[Change]:
    """Trace the forward of an autograd function without gradients with its context, and only with its own.

    Up to 2.14 stock counts the arguments to tell whether the forward takes a context, which is wrong where
    it takes any number of tensors: the backward of a gather to two ranks loses it.
    """
    owner = AutogradFunctionVariable
    if "len(args) - 1 == len(sig.parameters)" not in inspect.getsource(owner.call_apply):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            forward = self.fn_cls.forward
            takes_context = not _is_setup_context_defined(self.fn_cls.setup_context)
            if (
                kwargs
                or not inspect.isfunction(forward)
                or takes_context == (len(args) != len(inspect.signature(forward).parameters))
                or (torch.is_grad_enabled() and _may_need_gradient(args))
            ):
                return stock(self, tx, args, kwargs)
            source = self.source and AttrSource(self.source, "forward")
            context = [AutogradFunctionContextVariable.create(tx, args, kwargs)]
            function = VariableTracker.build(tx, forward, source=source, realize=True)
            return function.call_function(tx, [*context[:takes_context], *args], {})

        return call_apply

    return [WrapAttribute(owner, "call_apply", changed)]


def _may_need_gradient(args: Any) -> bool:
    found = []

    def visit(tracker: Any) -> None:
        if isinstance(tracker, NNModuleVariable):
            found.append(True)
        elif isinstance(tracker, TensorVariable):
            found.append(tracker.requires_grad is not False)

    VariableTracker.visit(visit, args)
    return any(found)


def _storages(value: Any) -> set[Any]:
    """The storages of a tensor, those inside a subclass's wrapper too; none of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return set()
    if not is_traceable_wrapper_subclass(value):
        return {StorageWeakRef(value.untyped_storage())}
    names, _ = value.__tensor_flatten__()
    return {key for name in names for key in _storages(getattr(value, name))}
