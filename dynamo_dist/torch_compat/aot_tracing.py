"""AOTAutograd's trace of a graph: autograd functions, equal meshes, and traces without a
compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable
from torch._dynamo.variables.nn_module import NNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _is_setup_context_defined
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import proxy_tensor

from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction, has

if TYPE_CHECKING:
    from torch import fx


def pass_context() -> list[Patch]:
    """Trace the forward of an autograd function without gradients with its context, and only with
    its own.

    Up to 2.14 upstream counts the arguments to tell whether the forward takes a context, which is
    wrong where it takes any number of tensors: the backward of a gather to two ranks loses it.
    """
    owner = AutogradFunctionVariable
    # Asked by the source, because no version number tells nightly builds with the fix from those
    # without.
    if "len(args) - 1 == len(sig.parameters)" not in inspect.getsource(owner.call_apply):
        return []

    def call_apply(upstream: Upstream, self: Any, tx: Any, args: Any, kwargs: Any) -> object:
        forward = self.fn_cls.forward
        # With a setup_context of its own, the forward takes no context; that is torch's rule in
        # eager mode too.
        takes_context = not _is_setup_context_defined(self.fn_cls.setup_context)
        if (
            kwargs
            or not inspect.isfunction(forward)
            or takes_context == (len(args) != len(inspect.signature(forward).parameters))
            or (torch.is_grad_enabled() and _may_need_gradient(args))
        ):
            return upstream(self, tx, args, kwargs)
        source = self.source and AttrSource(self.source, "forward")
        context = [AutogradFunctionContextVariable.create(tx, args, kwargs)]
        function = VariableTracker.build(tx, forward, source=source, realize=True)
        return function.call_function(tx, [*context[:takes_context], *args], {})

    return [WrapFunction(owner, "call_apply", call_apply)]


def gradients_are_apart() -> list[Patch]:
    """Trace the backward of an autograd function with gradients in memory of their own.

    Dynamo takes the forward's results for examples of their gradients. A forward that returns its
    argument, or a view of it, makes them aliases of values that the program still uses: a backward
    that writes to its gradient, as an ``all_reduce`` does, then counts as a write to those, and
    autograd refuses to go on with views of what was written to.
    ``AutogradFunctionApplyVariable.trace_backward_graph`` was seen in 2.13 to 2.15.
    """

    def trace_backward_graph(
        upstream: Upstream,
        self: object,
        tx: Any,
        ctx: VariableTracker,
        fwd_tracer: object,
        fwd_out: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        # The gradients are made from these examples, so it is these that must not share memory
        # with the program's.
        results = (
            [fwd_out] if isinstance(fwd_out, TensorVariable) else getattr(fwd_out, "items", ())
        )
        nodes = {each.as_proxy().node for each in results if isinstance(each, TensorVariable)}
        before = {
            node: node.meta["example_value"] for node in nodes if "example_value" in node.meta
        }
        # In the trace's own fake mode, or the new tensors would belong to another one and could
        # not meet its tensors.
        with tx.fake_mode, torch.no_grad():
            for node, value in before.items():
                node.meta["example_value"] = _apart(value)
        try:
            return upstream(self, tx, ctx, fwd_tracer, fwd_out, *args, **kwargs)
        finally:
            for node, value in before.items():
                node.meta["example_value"] = value

    name = "trace_backward_graph"
    off = "autograd functions whose backward writes to its gradient may not compile"
    if not has(AutogradFunctionApplyVariable, name, off=off):
        return []
    return [WrapFunction(AutogradFunctionApplyVariable, name, trace_backward_graph)]


def _apart(value: Any) -> object:
    """Return a tensor like ``value``, strides included, that shares memory with no other."""
    # clone() may choose other strides; the example's strides go into guards and into the backward
    # graph.
    if type(value) is FakeTensor and value.layout == torch.strided:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return value.detach().clone()


def _may_need_gradient(args: object) -> bool:
    found = []

    def visit(tracker: VariableTracker) -> None:
        if isinstance(tracker, NNModuleVariable):
            found.append(True)
        elif isinstance(tracker, TensorVariable):
            found.append(tracker.requires_grad is not False)

    VariableTracker.visit(visit, args)
    return any(found)


def equal_meshes_are_one() -> list[Patch]:
    """Let a mesh that comes in with a gradient be the equal one that came in with an argument.

    DTensor's sharding decisions are kept under keys that compare, so that a result may have the
    mesh of an earlier program, equal to this one's and another object. AOTAutograd knows it from
    the result's gradient alone: the forward would return what only the backward has ("Node
    tangents_2 was invalid, but is output"). Seen in 2.13 to 2.15.
    """

    def set_proxy_slot(upstream: Upstream, obj: object, tracer: Any, proxy: fx.Proxy) -> None:
        mesh, proxies = _real(obj), getattr(tracer, "_opaque_real_obj_proxy", None)
        # Only a mesh that is new to this trace: one that is an input keeps the proxy of its
        # own.
        if isinstance(mesh, DeviceMesh) and proxies is not None and id(mesh) not in proxies:
            for other, proxy_of_equal in tracer.opaque_tracker.items():
                if isinstance(_real(other), DeviceMesh) and _real(other) == mesh:
                    proxies[id(mesh)] = proxy_of_equal
                    break
        upstream(obj, tracer, proxy)

    return [WrapFunction(proxy_tensor, "set_proxy_slot", set_proxy_slot)]


def _real(obj: object) -> object:
    """Return the object that a stand-in represents while tracing; None otherwise."""
    try:
        # The stand-in's own __getattribute__ would be traced, or refuse a name that its class does
        # not declare.
        return object.__getattribute__(obj, "real_obj")
    except AttributeError:
        return None


def decompositions() -> Mapping[object, object]:
    """Inductor's table."""
    # It loads half a second of modules, which enabling alone does without.
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def trace_only(gm: Any, inputs: Any) -> None:
    """Let AOTAutograd trace forward and backward, and stop before anything is compiled."""
    from torch._dynamo.backends.common import aot_autograd  # as above

    def stop(*args: object, **kwargs: object) -> object:
        raise _Traced

    try:
        aot_autograd(
            fw_compiler=stop,
            bw_compiler=stop,
            inference_compiler=stop,
            # The partitioner is the first step after the joint graph has been traced.
            partition_fn=stop,
            decompositions=decompositions(),
        )(gm, inputs)
    except _Traced:
        return


class _Traced(Exception):
    pass
