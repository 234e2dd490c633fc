"""Reach Inductor: its configuration, passes attached, orders pinned, graphs compiled.

Torch 2.11 lacks ``CustomInferenceAwareGraphPass``. Once no such torch is supported, passes derive
from that class and receive the phase as an argument. ``pass_base`` and ``is_inference`` then go,
and ``call_pass`` no longer asks whether torch has the class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch.utils._ordered_set import OrderedSet

from inductor_passes.torch_compat import TorchFunction
from inductor_passes.torch_compat.dynamo import graph_being_compiled


def inductor_config() -> Any:
    """``torch._inductor.config``, imported on first use. Seen in 2.11 to 2.15."""
    # ``import torch._inductor`` takes about a second: a process that compiles nothing, as one that
    # reads a report, does without.
    from torch._inductor import config

    return config


def has_config(key: str) -> bool:
    """Return whether this torch's Inductor knows the dotted configuration key."""
    return key in inductor_config().get_config_copy()


def get_config(key: str) -> Any:
    """The current value of a dotted key, under whatever patch is active."""
    value: Any = inductor_config()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def config_keys() -> frozenset[str]:
    """Every dotted key of this torch's Inductor configuration."""
    return frozenset(inductor_config().get_config_copy())


def is_config_set(key: str) -> bool:
    """Return whether the dotted key has another value in this process than torch gives it.

    Torch's own record of who set what is no help: after a patch, it says that everything in the
    patch was set. ``_config`` was seen in 2.11 to 2.15.
    """
    return bool(get_config(key) != inductor_config()._config[key].default)


def values_set() -> dict[str, str]:
    """What is set otherwise than torch has it, by dotted key; no functions and objects, which
    have no stable text.
    """
    # ``repr`` of a function or an object has its address, which differs between processes: such
    # values cannot be part of a key.
    texts = {key: repr(get_config(key)) for key in config_keys() if is_config_set(key)}
    return {key: text for key, text in texts.items() if " at 0x" not in text}


def digests() -> dict[str, str]:
    """What Inductor's configuration has set, and AOTAutograd's whole one, as text.
    ``get_config_copy`` was seen in 2.11 to 2.15.
    """
    texts = {key: repr(value) for key, value in functorch_config.get_config_copy().items()}
    return {**values_set(), **{key: text for key, text in texts.items() if " at 0x" not in text}}


def is_inductor_key(key: str) -> bool:
    """Return whether torch.compile would take ``key`` in ``options``; dashes count as
    underscores.
    """
    return key.replace("-", "_") in config_keys()


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor configuration of a ``mode=``. Raises RuntimeError, naming the known, for another."""
    import torch._inductor  # takes about a second

    return dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}


def pass_base() -> type:
    """Return the base class of an Inductor graph pass, which receives whether it is inference.

    ``CustomInferenceAwareGraphPass`` was seen in 2.13 and 2.15; 2.11 has ``CustomGraphPass`` only.
    """
    from torch._inductor import custom_graph_pass  # loads all of Inductor

    return getattr(
        custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
    )


def is_inference(told: bool | None) -> bool:
    """Return whether Inductor compiles for inference; torch 2.11 does not say it to passes, but
    to the graph's name.
    """
    return "inference" in graph_being_compiled() if told is None else told


def call_pass(pass_: TorchFunction, graph: fx.Graph, is_inference: bool) -> None:
    """Call a user's Inductor pass the way this torch would."""
    from torch._inductor import custom_graph_pass  # loads all of Inductor

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is not None and isinstance(pass_, aware):
        pass_(graph, is_inference)
    else:
        pass_(graph)


def reorder_for_locality(graph: fx.Graph) -> None:
    """Upstream's pass of that name. Seen in 2.11 to 2.15."""
    # Loads all of Inductor.
    from torch._inductor.fx_passes.post_grad import reorder_for_locality as upstream

    upstream(graph)


def sort_by_data(graph: fx.Graph) -> None:
    """Move nodes after what they read, where patterns have left them before it.

    Seen in 2.11 to 2.15.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort  # loads Inductor

    stable_topological_sort(graph)


def write_alpha_as_product(graph: fx.Graph) -> int:
    """Rewrite ``add(a, b, alpha=k)`` as ``add(a, mul(b, k))`` where ``a`` or ``b`` is a matrix
    product; ``sub`` likewise. Return how many sums were rewritten.

    Inductor fuses ``add(a, mm(b, c))`` to ``addmm(a, b, c)`` and, under max-autotune, the sum of
    two products to one kernel. Its pattern matcher takes a node with more keyword arguments than
    the pattern has, so that ``add(a, mm(b, c), alpha=2)`` becomes the same ``addmm``: silently
    wrong (seen in 2.13 to 2.14; no issue known). SGD's update, ``parameter.add_(gradient,
    alpha=-lr)``, is such a sum as soon as one graph holds the backward and the optimizer.

    Run it before the post-grad patterns. Inductor lowers ``alpha`` to a product and a sum itself,
    so that doing it earlier changes no number.
    """
    rewritten = 0
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            alpha = node.kwargs.get("alpha", 1)
            if isinstance(alpha, int | float) and alpha == 1:
                continue
            if not any(each.target in _PRODUCTS for each in node.all_input_nodes):
                continue
            left, right = node.args
            # No pattern of products takes a number, or types that differ, where the product would
            # be rounded before the sum.
            if not isinstance(right, fx.Node) or right.meta["val"].dtype != node.meta["val"].dtype:
                continue
            with graph.inserting_before(node), right.meta["val"].fake_mode:
                scaled = graph.call_function(_aten.mul.Tensor, (right, alpha))
                factor = alpha.meta["val"] if isinstance(alpha, fx.Node) else alpha
                scaled.meta["val"] = right.meta["val"] * factor
            node.args = (left, scaled)
            node.kwargs = {}
            rewritten += 1
    return rewritten


_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_PRODUCTS = frozenset(
    op.default for op in (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.convolution)
)


@functools.cache
def can_pin_order() -> bool:
    """Return whether upstream's ``control_dependencies`` is there to pin an order. Seen in 2.11
    to 2.15.
    """
    try:
        from torch._inductor.fx_passes import control_dependencies  # loads all of Inductor
    except ImportError:
        return False
    return hasattr(control_dependencies, "preserve_node_ordering")


def pin_nodes(graph: fx.Graph, after: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
    """Make each key run after its values in the generated code. Call only if ``can_pin_order()``.

    Each key is replaced by a higher-order op of the same name that holds the original operation.
    """
    # Not in every torch: callers ask ``can_pin_order()`` first.
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})


def is_aot_inductor() -> bool:
    """Return whether Inductor is compiling ahead of time, for a shared library. Seen in 2.11 to
    2.15.
    """
    from torch._inductor.virtualized import V  # loads all of Inductor

    return bool(getattr(V, "aot_compilation", False))


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Any,
    inner_compile: TorchFunction,
    patches: Mapping[str, object],
    region: str | None = None,
) -> TorchFunction:
    """Upstream's entry for backends. ``region``: the compile's name in torch's logs, from 2.12
    on. Seen in 2.11 to 2.15.
    """
    from torch._inductor.compile_fx import compile_fx as upstream  # loads all of Inductor

    # Passed only where it is wanted: torch 2.11 has no such argument.
    named: dict[str, Any] = {} if region is None else {"compile_region_name": region}
    compiled: Any = upstream(
        gm, example_inputs, inner_compile=inner_compile, config_patches=dict(patches), **named
    )
    return compiled


def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
    """Upstream's compile of one lowered graph. Seen in 2.11 to 2.15."""
    from torch._inductor.compile_fx import compile_fx_inner as upstream  # loads Inductor

    return upstream(*args, **kwargs)


@contextlib.contextmanager
def fusing_within(phase_of: Callable[[Iterable[fx.Node]], int | None]) -> Iterator[None]:
    """Have Inductor fuse nothing across a border, in the block: what comes from nodes of which
    ``phase_of`` says another number. None goes with all.

    ``V.set_choices_handler`` and ``InductorChoices.can_fuse`` were seen in 2.11 to 2.15.
    """
    from torch._inductor.virtualized import V  # loads Inductor

    upstream = V.choices

    def can_fuse(scheduler: Any, first: Any, second: Any, score: Any) -> bool:
        phases = {phase_of(_origins(node)) for node in (first, second)}
        if len(phases - {None}) > 1:
            return False
        return bool(upstream.can_fuse(scheduler, first, second, score))

    choices: Any = copy.copy(upstream)
    choices.can_fuse = can_fuse
    with V.set_choices_handler(choices):
        yield


def _origins(node: Any) -> Iterator[fx.Node]:
    for each in node.get_nodes():
        if each.node is not None:
            yield from each.node.get_origins()


def _tied(after: Sequence[object], graph: TorchFunction, *args: object, **kwargs: object) -> object:
    """``control_deps`` where nodes run in the order of the graph. Upstream's has no kernel below
    autograd up to 2.11.
    """
    return graph(*args, **kwargs)


def _with_results(operator: TorchFunction) -> TorchFunction:
    """An in-place ``_foreach`` operator that returns what it wrote, as its lowering does."""

    def call(tensors: Sequence[object], *args: object, **kwargs: object) -> object:
        operator(tensors, *args, **kwargs)
        return tensors

    return call


def run_post_grad(gm: fx.GraphModule, inputs: Sequence[object], is_inference: bool) -> None:
    """Run upstream's post-grad passes on a graph, in the fake mode of its inputs.

    ``post_grad_passes``, ``detect_fake_mode`` and ``V.set_fake_mode`` were seen in 2.11 to 2.15.
    """
    # Loads all of Inductor.
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    # Passes make nodes with ``meta["val"]``, in the mode of ``V``: without one they fail.
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(gm, is_inference)


def run_graph_passes(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """In place of ``compile_fx_inner``: Inductor up to and with its graph passes; the graph then
    runs as it is.

    Seen in 2.11 to 2.15.
    """
    run_post_grad(gm, inputs, bool(kwargs.get("is_inference")))
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "control_deps":
            node.target = _tied
        # Eager's returns nothing.
        elif (
            str(node.target).startswith("aten._foreach")
            and node.users
            and node.target._schema.is_mutable
        ):
            node.target = _with_results(node.target)
    gm.recompile()

    def boxed(given: list[object]) -> object:
        arguments = list(given)
        # The boxed convention: the caller's list is emptied, so that inputs can die while the graph
        # runs.
        given.clear()
        return gm(*arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
