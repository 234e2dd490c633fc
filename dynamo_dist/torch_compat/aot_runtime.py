"""What AOTAutograd does around each call of a graph: inputs in flight, outputs, wrapped
DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # first: runtime_wrappers imports it in a circle otherwise
import torch._functorch._aot_autograd.runtime_wrappers as _runtime_wrappers
import torch.fx.experimental.proxy_tensor as _proxy_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dynamo_dist.torch_compat.patching import (
    Patch,
    SetAttribute,
    Upstream,
    WrapAttribute,
    WrapFunction,
    _optional_module,
    has,
)


def on_forward_with_tangents(
    cls: type, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Patch]:
    """Run ``wrap(forward)`` for each forward whose backward takes several gradients, one of them
    a ``cls``.
    """

    def post_compile(
        upstream: Upstream,
        self: Any,
        compiled_fn: Any,
        *args: object,
        runtime_metadata: Any,
        **kwargs: object,
    ) -> object:
        tangents = runtime_metadata.subclass_tangent_meta or ()
        kinds = [getattr(meta, "original_subclass_type", None) for meta in tangents]
        # With one gradient there is no backward at all where it is absent, so nothing has to be
        # watched.
        if self.trace_joint and len(kinds) > 1 and cls in kinds:
            compiled_fn = wrap(compiled_fn)
        return upstream(self, compiled_fn, *args, runtime_metadata=runtime_metadata, **kwargs)

    return [WrapFunction(_runtime_wrappers.RuntimeWrapper, "post_compile", post_compile)]


def on_plain_tangent(
    cls: type, answer: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> list[Patch]:
    """A plain gradient where the backward was traced with a ``cls``: ``answer(gradient, metadata)``
    in its place.

    ``metadata``: what ``__tensor_flatten__`` gave. On None upstream refuses it.
    """

    def process_runtime_tangent(
        upstream: Upstream, x: Any, meta: Any, *args: Any, **kwargs: Any
    ) -> object:
        # A tangent of the class that was traced with is upstream's business; so is a subclass of
        # Tensor.
        if type(x) is torch.Tensor and getattr(meta, "original_subclass_type", None) is cls:
            found = answer(x, meta.meta)
            x = x if found is None else found
        return upstream(x, meta, *args, **kwargs)

    owner = _runtime_wrappers.AOTDispatchAutograd
    return [WrapFunction(owner, "process_runtime_tangent", process_runtime_tangent)]


def keep_first_symbols() -> list[Patch]:
    """While AOTAutograd makes a graph, a size that is known as an input stays known as that input.

    Upstream lets any later value that simplifies to the same symbol take its place, such as the
    ``sym_max(s0, 1)`` by which DTensor computes strides, whose own argument is then looked up as
    itself, without end. Seen in torch 2.13 to 2.15.
    """

    def set_proxy_slot(upstream: Upstream, obj: Any, tracer: Any, proxy: Any) -> None:
        first = expression = None
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            # Upstream keys its table by expression: two values with one expression are one entry
            # there.
            expression = obj.node.expr
            first = tracer.sympy_expr_tracker.get(expression)
        upstream(obj, tracer, proxy)
        if first is not None:
            # Put back rather than kept away from upstream, which needs to see the value for its
            # other tables.
            tracer.sympy_expr_tracker[expression] = first

    return [WrapFunction(_proxy_tensor, "set_proxy_slot", set_proxy_slot)]


def wrap_with(unflatten: Callable[..., DTensor]) -> Patch:
    """``unflatten`` becomes ``DTensor.__tensor_unflatten__``, and gets the one before as
    ``upstream``.
    """
    return WrapAttribute(
        DTensor,
        "__tensor_unflatten__",
        # A partial and not a closure: it costs no Python frame in a call that each output of each
        # step makes.
        lambda upstream: staticmethod(functools.partial(unflatten, upstream=upstream)),
    )


upstream_unflatten: Callable[..., DTensor] = DTensor.__tensor_unflatten__
# ``dtensor(local, spec, requires_grad=...)``, without an initializer that does nothing but take
# time.
_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)
dtensor: Callable[..., DTensor] = DTensor if _new is None else functools.partial(_new, DTensor)
Wrap = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def write_to_pending_inputs() -> list[Patch]:
    """Let in-place ops on a tensor in flight that enters a graph write to the tensor itself.

    AOTAutograd waits for such inputs before the graph; for those inside of DTensors from 2.14 on.
    In 2.13 the graph waits, and what that gives is another tensor, so that a write to it is lost.
    """
    if hasattr(_optional_module("torch._functorch._aot_autograd.schemas"), "ActInputPath"):
        return []

    def changed(upstream: Upstream) -> Upstream:
        @functools.wraps(upstream)
        def dispatch(
            func: Any,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            if func._schema.is_mutable:
                for tensor in tree_leaves((args, kwargs)):
                    if not isinstance(tensor, AsyncCollectiveTensor) or tensor.completed:
                        continue
                    if isinstance(tensor.elem, FunctionalTensor):
                        # While functionalized: the copy makes the write one to the graph's input,
                        # which is written back after the graph.
                        tensor.elem.copy_(tensor.trigger_wait())
                    elif isinstance(tensor.elem, FakeTensor):
                        tensor.completed = True  # what the graph made of it is written back
            return upstream(func, types, args, kwargs)

        return staticmethod(dispatch)

    return [WrapAttribute(AsyncCollectiveTensor, "__torch_dispatch__", changed)]


def pending_inputs_have_gradients() -> list[Patch]:
    """Trace an input that waits when it is read with its gradient, where one is recorded.

    AOTAutograd replaces it by the tensor inside, which never has a gradient. That cuts off what
    eager mode recorded before, and the gradients further back are silently missing.
    Seen in torch 2.13 to 2.15.
    """
    places = [
        _optional_module("torch._functorch._aot_autograd.frontend_utils"),
        _optional_module("torch._functorch.aot_autograd"),
    ]
    if not has(places[0], "process_inputs", off="inputs in flight lose their gradients"):
        return []
    upstream: Any = getattr(places[0], "process_inputs")  # noqa: B009 - may be missing

    @functools.wraps(upstream)
    def process(flat_args: list[Any], *args: Any, **kwargs: Any) -> Any:
        before = list(flat_args)
        found = upstream(flat_args, *args, **kwargs)
        if isinstance(found, tuple):
            for i, (given, traced) in enumerate(zip(before, found[0], strict=True)):
                # Compared by position: process_inputs replaces inputs in place and adds none.
                if isinstance(given, AsyncCollectiveTensor) and given.requires_grad:
                    found[0][i] = _with_gradient(traced, given.is_leaf)
        return found

    return [
        SetAttribute(place, "process_inputs", process)
        for place in places
        if getattr(place, "process_inputs", None) is upstream
    ]


def _with_gradient(traced: torch.Tensor, is_leaf: bool) -> torch.Tensor:
    if traced.requires_grad:
        return traced
    # The graph may be called under no_grad(), while AOTAutograd still looks at requires_grad of its
    # inputs.
    with torch.enable_grad():
        leaf = traced.detach().requires_grad_()
        # A leaf and a result differ in what may be done to them in place, so the trace has to see
        # the same kind.
        return leaf if is_leaf else leaf.clone(memory_format=torch.preserve_format)
