"""Modules while tracing: hooks, backward, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.compiled_autograd as _compiled_autograd
import torch._dynamo.config as _dynamo_config
import torch._dynamo.variables.builder as _builder
import torch._dynamo.variables.higher_order_ops as _higher_order_ops
import torch.distributed._composable_state as _composable_state
from torch._dynamo.eval_frame import DisableContext, OptimizeContext, OptimizedModule
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._higher_order_ops.wrap import wrap as _wrap
from torch.fx import GraphModule
from torch.utils.hooks import BackwardHook

from dynamo_dist.torch_compat import dynamo_building
from dynamo_dist.torch_compat.dynamo_building import (
    build_list,
    call_traced,
    fake_tensor,
    graph_break,
    realized,
)
from dynamo_dist.torch_compat.dynamo_calls import tensor_inputs
from dynamo_dist.torch_compat.dynamo_dtensors import MODULE_HOOK
from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

State: Any = _composable_state._State
module_state: Callable[[Any], Any] = _composable_state._get_module_state


def on_module_compiled(
    wanted: Callable[[Any], bool],
    function_of: Callable[[Any], Callable[..., Any]],
    apart: Callable[[Any], bool],
) -> list[Patch]:
    """Compile ``function_of(module)`` for modules that are wanted, in place of the frames in their
    call.

    A call for which ``apart(module)`` runs those frames as in upstream. Seen in torch 2.13 to 2.15.
    """

    def either(module: Any, frames: Any, compile: Callable[..., Any]) -> Any:
        # Nothing is compiled yet: Dynamo does that at the first call, so a call that runs the
        # frames costs nothing.
        compiled = compile(function_of(module))
        return lambda *args, **kwargs: (frames if apart(module) else compiled)(*args, **kwargs)

    def initialize(upstream: Upstream, self: Any) -> None:
        upstream(self)
        module = self._orig_mod
        if not isinstance(self.dynamo_ctx, DisableContext) and wanted(module):
            # A lazy module runs its initialisation hook first, for which torch keeps the
            # compiled call as ``_forward``.
            name = "_forward" if hasattr(module, "_initialize_hook") else "forward"
            setattr(self, name, either(module, getattr(self, name), self.dynamo_ctx))

    def call(upstream: Upstream, self: Any, fn: Any) -> Any:
        found = upstream(self, fn)
        # ``Module.compile`` compiles the bound ``_call_impl``; functions are none of our
        # business.
        if getattr(fn, "__func__", None) is not torch.nn.Module._call_impl:
            return found
        if wanted(fn.__self__):
            return either(fn.__self__, found, self)
        # A module may be sharded after its compile: ``compile_as_one_graph_later`` finds here
        # how it was compiled.
        setattr(found, _COMPILE, self)
        return found

    return [
        WrapFunction(OptimizedModule, "_initialize", initialize),
        # What ``Module.compile`` calls, behind the lookup of the backend, at which the plugin may
        # have come.
        WrapFunction(OptimizeContext, "__call__", call),
    ]


def compile_as_one_graph_later(
    module: Any,
    wanted: Callable[[Any], bool],
    function_of: Callable[[Any], Callable[..., Any]],
    apart: Callable[[Any], bool],
) -> None:
    """As ``on_module_compiled``, for a module that was compiled before it got what makes it wanted;
    nothing for any other.

    ``wanted(module)`` is asked at the first call for which not ``apart(module)``.
    """
    is_wrapper = isinstance(module, OptimizedModule)
    # A wrapper's own hooks run around what it has compiled.
    frames: Any = module._call_impl if is_wrapper else module._compiled_call_impl
    compile = module.dynamo_ctx if is_wrapper else getattr(frames, _COMPILE, None)
    if compile is None or isinstance(compile, DisableContext):
        return
    chosen: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if apart(module):
            return frames(*args, **kwargs)
        if not chosen:
            chosen.append(compile(function_of(module)) if wanted(module) else frames)
        return chosen[0](*args, **kwargs)

    # A wrapper hands attributes on to the module in it.
    # ``Module.__call__`` looks here first, for a plain module and for the wrapper alike.
    object.__setattr__(module, "_compiled_call_impl", call)


_COMPILE = "_dynamo_dist_compile"  # of a module's compiled call: what compiled it


def on_module_backward_hooks(create: Callable[..., object]) -> list[Patch]:
    """``BackwardHook(module, hooks, pre_hooks)`` while tracing, unless compiled autograd is on.

    Seen in torch 2.13 to 2.15.
    """

    def hooks(
        upstream: Upstream, tx: InstructionTranslatorBase, *args: object, **kwargs: object
    ) -> object:
        # Compiled autograd traces the hooks itself, when the backward runs.
        is_upstreams = _compiled_autograd.compiled_autograd_enabled
        return (upstream if is_upstreams else create)(tx, *args, **kwargs)

    return [WrapFunction(BackwardHookVariable, "create", hooks)]


def is_tensor(tracker: object) -> bool:
    """Return whether it tracks a tensor."""
    return isinstance(realized(tracker), TensorVariable)


def is_tensor_with_gradient(tracker: VariableTracker) -> bool:
    """Return whether it tracks a tensor that requires gradients."""
    return is_tensor(tracker) and bool(fake_tensor(tracker).requires_grad)


def build_tuple(tx: Any, items: list[Any]) -> Any:
    """A new tuple of trackers."""
    return call_traced(tx, _as_tuple, [build_list(tx, items)], {})


def _as_tuple(items: list[object]) -> tuple[object, ...]:
    return tuple(items)


def node_of_tensors(
    tx: InstructionTranslatorBase, function: Callable[..., object], args: tuple[object, ...]
) -> VariableTracker:
    """A node of the graph that calls a function of ours, which returns tensors; their tracker."""
    proxy = tx.output.create_proxy("call_function", function, args, {})
    return _builder.wrap_fx_proxy(tx=tx, proxy=proxy)


def node_of_constant(
    tx: InstructionTranslatorBase, function: Callable[..., object], args: tuple[object, ...]
) -> Any:
    """A node of the graph that calls a function of ours, which returns torch's module hooks; its
    proxy.
    """
    proxy = tx.output.create_proxy("call_function", function, args, {})
    # Dynamo takes what a node returns from this entry; a hook object is no tensor that it could
    # derive.
    proxy.node.meta["example_value"] = BackwardHook(None, [], [])
    return proxy


def traced_apart(
    tx: Any, call: Callable[..., Any], tensors: list[Any], kind: str, why: str, fix: str
) -> tuple[Any, list[Any]]:
    """Trace ``call(*trackers)`` as a graph of its own: the graph, and the proxies of what it closes
    over.

    ``call`` gets trackers of new inputs like ``tensors`` and returns a tuple of tensors. What has
    another effect than its result breaks with the given text.
    """
    try:
        _, graph, free = _higher_order_ops.speculate_subgraph(
            tx,
            LambdaVariable(call),
            tensors,
            {},
            MODULE_HOOK,
            source_target=_wrap,
            enable_grad=False,
            # The trackers given are the subgraph's inputs as they are, one each, in this order.
            set_subgraph_inputs="manual",
            supports_input_mutation=False,
            # A hook may return the gradient that it was given.
            supports_aliasing=True,
        )
    except Unsupported as error:
        graph_break(kind, str(error).splitlines()[0], why, fix)
    return graph, list(free.keys())


def computes_nothing(graph: Any) -> bool:
    """Return whether a graph has inputs and an output only, but for switching gradients off and
    on.
    """
    return all(
        node.op in ("placeholder", "output") or node.target is torch._C._set_grad_enabled
        for node in graph.nodes
    )


def graph_as_argument(tx: Any, graph: Any) -> Any:
    """A proxy of the graph as a function, for another node to call."""
    modules = tx.output.tracing_context.module_context.copy_graphstate()
    name = tx.output.install_subgraph("hook_body", GraphModule(modules.nn_modules, graph))
    return tx.output.create_proxy("get_attr", name, (), {})


def on_backward(
    before: Callable[[Any, Any], None],
    after: Callable[[Any, list[tuple[Any, Any]]], None],
    broken: Callable[[Any], None],
) -> list[Patch]:
    """Trace ``Tensor.backward`` as gradients that the graph computes and accumulates, unless the
    user set torch to trace it.

    ``before(tx, tensor)`` and ``after(tx, leaves with stand-ins of their gradients)`` may break the
    graph. After a break, theirs or upstream's, ``broken(tx)`` is called.
    """

    def call_method(
        upstream: Upstream, self: Any, tx: Any, name: str, args: Any, kwargs: Any
    ) -> object:
        if name != "backward" or _dynamo_config.trace_autograd_ops:
            return upstream(self, tx, name, args, kwargs)
        try:
            before(tx, self)
            _add_attributes_to_leaves(tx)
            with _dynamo_config.patch(trace_autograd_ops=True):
                result = upstream(self, tx, name, args, kwargs)
            after(tx, _latest_gradients(tx))
        except Unsupported:
            broken(tx)
            raise
        return result

    return [WrapFunction(TensorVariable, "call_method", call_method)]


def _add_attributes_to_leaves(tx: Any) -> None:
    """Let upstream see the parameters that are attributes of the graph.

    It looks for leaves among inputs, and without one of them it takes ``backward`` for nothing.
    """
    inputs = {id(each) for each in tx.output.input_source_to_var.values()}
    known = inputs | {id(each) for each in tx.output.leaf_var_creation_order}
    tx.output.leaf_var_creation_order += [
        each for each in tensor_inputs(tx) if id(each) not in known
    ]


def _latest_gradients(tx: Any) -> list[tuple[Any, Any]]:
    node = _latest_backward(tx)
    if node is None:
        return []  # no leaf takes a gradient
    leaves, gradients = node.args[1], node.meta["example_value"]
    trackers = {each.as_proxy().node: each for each in tensor_inputs(tx)}
    return [
        (trackers.get(leaf), gradient)
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]


def _latest_backward(tx: Any) -> Any:
    graph = tx.output.current_tracer.graph
    return max(graph.find_nodes(op="call_function", target=torch.autograd.grad), default=None)


def add_to_latest_gradients(tx: Any, accumulated: list[tuple[Any, Any]]) -> None:
    """Have the latest ``backward()`` begin at more tensors, each with a gradient of its own."""
    node = _latest_backward(tx)
    if node is None:  # nothing in the graph takes a gradient
        return
    loss, leaves, *gradient = node.args
    tensors, gradients = zip(*accumulated, strict=True)
    node.args = (
        (loss, *(each.as_proxy().node for each in tensors)),
        leaves,
        (*(gradient or [None]), *(each.as_proxy().node for each in gradients)),
    )


def value_without_source(tx: Any, tracker: Any, name: str) -> Any:
    """``tensor.grad``, if the graph has set it, and ``tensor.requires_grad``; None leaves another
    attribute to upstream.

    Upstream notes the attribute's source on what it finds. After the graph it then stores, in place
    of a gradient that the graph has computed, what the attribute held before: gradients are
    silently lost. It also notes it on the one tracker that stands for None in all programs. Seen in
    2.13 to 2.15.
    """
    effects = tx.output.side_effects
    if name == "grad" and effects.has_pending_mutation_of_attr(tracker, name):
        return effects.load_attr(tracker, name)
    if name == "requires_grad" and tracker.requires_grad is not None:
        return dynamo_building.build(tx, tracker.requires_grad)
    return None


def on_tensor_method(method: str, answer: Callable[[Any, Any, Any], Any]) -> list[Patch]:
    """Answer ``tensor.method(*args)`` by ``answer(tx, tensor, args)``; None leaves it to
    upstream.
    """

    def call_method(
        upstream: Upstream,
        self: object,
        tx: InstructionTranslatorBase,
        name: str,
        args: VariableTracker,
        kwargs: dict[str, VariableTracker],
    ) -> object:
        found = answer(tx, self, args) if name == method else None
        return upstream(self, tx, name, args, kwargs) if found is None else found

    return [WrapFunction(TensorVariable, "call_method", call_method)]


def on_methods(
    answers: dict[object, Callable[..., object]],
    failed: dict[object, Callable[[str], None]],
    stands_for: Callable[[Any], Any],
) -> list[Patch]:
    """Answer calls of a method written in Python by ``answers[method](tx, [receiver, *args],
    kwargs)``; None leaves it to upstream.

    ``stands_for(function)`` is the method that a function stands for. Of a method in ``failed``
    upstream's break is first given to ``failed[method](its text)``. Seen in torch 2.13 to 2.15.
    """

    def call_function(upstream: Upstream, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = stands_for(self.fn)
        # A method is known by its function: each access binds it anew.
        function = getattr(found, "__func__", found)
        if (answer := answers.get(function)) is not None:
            if found is not function:
                receiver = [dynamo_building.build_by_weakref(tx, found.__self__)]
            else:
                bound = vars(self).get("im_self", vars(self).get("obj"))  # up to 2.14
                receiver = [] if bound is None else [bound]
            result = answer(tx, [*receiver, *args], kwargs)
            return upstream(self, tx, args, kwargs) if result is None else result
        if (explain := failed.get(function)) is None:
            return upstream(self, tx, args, kwargs)
        try:
            return upstream(self, tx, args, kwargs)
        except Unsupported as error:
            # It raises a break of its own, which names the fix; upstream's only names a frame
            # inside torch.
            explain(str(error))
            raise

    return [
        WrapFunction(owner, "call_function", call_function)
        for owner in (UserFunctionVariable, UserMethodVariable)
    ]


def on_reads(answer: Callable[[Any, Any, str], Any]) -> list[Patch]:
    """Answer ``module.name`` by ``answer(tx, tracker of module, name)``; None leaves it to
    upstream.

    Called ``var_getattr`` up to 2.13.
    """

    def read(upstream: Upstream, self: object, tx: InstructionTranslatorBase, name: str) -> Any:
        found = answer(tx, self, name)
        return upstream(self, tx, name) if found is None else found

    name = next(
        name
        for name in ("tp_getattro_impl", "var_getattr")
        if name in vars(UnspecializedNNModuleVariable)
    )
    return [WrapFunction(UnspecializedNNModuleVariable, name, read)]


def uncompiled(module: object) -> Any:
    """The module that ``torch.compile`` has wrapped; anything else as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module
