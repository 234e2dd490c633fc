"""Own the order of a graph, and make it survive Inductor's lowering."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph.aliasing import op_facts
from inductor_passes.graph.collectives import is_launch, is_wait, waits_of
from inductor_passes.torch_compat import inductor
from inductor_passes.torch_compat import inductor as inductor_compat

NAME = "pin_order"
# Below this a reduction hides too little to be worth a dependency.
MIN_REDUCTION_US = 5.0
# A tie costs compile time, so one that the data implies is left out, if that is soon seen.
SEARCH_STEPS = 64

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
# Ops that Inductor lowers to a kernel of their own: tying one to a launch costs no fusion.
OWN_KERNEL = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.convolution,
        aten.convolution_backward,
        aten._scaled_mm,
        aten._grouped_mm,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
# Where a node says what its value is like.
_VALUE = ("val", "tensor_meta")
FUSED_NAMESPACE = "inductor_passes"  # of our own kernels, which have a launch inside
REDUCTIONS = frozenset(
    {aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.prod, aten.any, aten.argmax}
)


def has_own_kernel(node: fx.Node) -> bool:
    """Return whether Inductor gives the node a kernel call of its own (a matrix product, attention ...)."""
    if getattr(node.target, "namespace", "") == FUSED_NAMESPACE:
        return True
    return getattr(node.target, "overloadpacket", None) in OWN_KERNEL


def pin_order(graph: fx.Graph, cost: CostModel) -> int:
    """Tie launches, waits and the compute between them to their present order; count the ties.

    Runs last: the tied nodes become higher-order ops that no other pass looks into. A graph without
    a launch is left alone.
    """
    _wait_as_stock(graph)
    after: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None  # the launch or wait passed most recently
    since: list[fx.Node] = []  # anchors passed since
    to_come: set[fx.Node] = set()  # the waits of what is in flight: one a tensor if it is coalesced
    for node in list(graph.nodes):
        if is_launch(node) or is_wait(node):
            before = [*since, *([last] if last is not None else [])]
            if before:
                after[node] = before
            to_come.update(waits_of(node) if is_launch(node) else ())
            to_come.discard(node)
            last, since = node, []
        elif _is_anchor(node, cost):
            if last is not None and to_come and not _reads(node, {last, *since}):
                after[node] = [last]
            since.append(node)
    if not any(is_launch(node) for node in graph.nodes):
        return 0
    _reduce_in_place(graph)
    inductor_compat.pin_nodes(graph, after)
    return len(after)


def _reads(node: fx.Node, some: set[fx.Node]) -> bool:
    """Return whether the node's value is made, in a few steps, of one of ``some``: then it runs after it anyway."""
    stack, seen = list(node.all_input_nodes), set[fx.Node]()
    while stack and len(seen) < SEARCH_STEPS:
        source = stack.pop()
        if source in some:
            return True
        if source not in seen:
            seen.add(source)
            stack.extend(source.all_input_nodes)
    return False


def _is_anchor(node: fx.Node, cost: CostModel) -> bool:
    if has_own_kernel(node):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet in REDUCTIONS and cost.compute_us(node) >= MIN_REDUCTION_US


def _wait_as_stock(graph: fx.Graph) -> None:
    """Wait by stock's operator where nobody reads the wait's value.

    Inductor drops the value of any other, and with it what was to run after it. Stock's gives what was
    launched where ours gives a token, and what is tied is lowered only if its stand-in says so.
    """
    for node in graph.nodes:
        if is_wait(node) and not node.users:
            node.target, node.args = c10d.wait_tensor.default, node.args[:1]
            (launch,) = node.all_input_nodes
            node.meta.update((key, launch.meta[key]) for key in _VALUE if key in launch.meta)


def _reduce_in_place(graph: fx.Graph) -> None:
    """Let an all_reduce overwrite an input that nobody else reads.

    Stock's own pass for this runs after ours and cannot see into a tied node, which would cost a
    copy of every payload.
    """
    for launch in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if _is_last_reader(launch, launch.args[0]):
            launch.target = c10d.all_reduce_.default


def _is_last_reader(launch: fx.Node, value: object) -> bool:
    """Return whether ``value`` is fresh memory of this graph, read by the launch alone."""
    while isinstance(value, fx.Node) and value.op == "call_function" and len(value.users) == 1:
        if not op_facts(value.target).view:
            return isinstance(value.target, torch._ops.OpOverload) and not is_wait(value)
        value = value.args[0]
    return False


log = logging.getLogger(__name__)

# Everything in Inductor that moves a launch or a wait, by configuration key and its off value.
STOCK_SCHEDULERS: Mapping[str, object] = {
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "enable_simple_overlap": False,
    "_micro_pipeline_tp": False,
    "_fuse_ddp_communication": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}


def stock_schedulers_on(patches: Mapping[str, Any]) -> dict[str, object]:
    """Stock's schedulers that would run under the current configuration and ``patches``."""
    known = inductor.config_keys()
    found = {}
    for key, off in STOCK_SCHEDULERS.items():
        if key in known:
            value = patches[key] if key in patches else inductor.get_config(key)
            if value != off and value is not None:
                found[key] = value
    return found


def take_ownership(patches: Mapping[str, Any]) -> dict[str, object]:
    """Patches that switch stock's schedulers off, with a warning for what the user had asked for."""
    running = stock_schedulers_on(patches)
    say_taken(
        running,
        patches,
        "Inductor's own scheduling (%s) is off in this compile: two schedulers undo each "
        "other, and the pass 'schedule' owns it. Use options={'schedule': 'off'} "
        "to let Inductor's run instead.",
    )
    if running:
        log.info("Inductor's own scheduling is off in this compile: %s", ", ".join(sorted(running)))
    return {key: STOCK_SCHEDULERS[key] for key in running}


# What has been said of a key and of where it was set: once in a process.
_said: set[tuple[str, str]] = set()


def say_taken(keys: Iterable[str], patches: Mapping[str, Any], message: str) -> None:
    """Warn, once in a process, of those of ``keys`` that the user has set, by options or for the process.

    ``message`` has one ``%s`` for them. What torch has on by default was asked for by nobody.
    """
    asked = []
    for key in sorted(keys):
        given = key in patches
        if given or inductor.is_config_set(key):
            where = "options" if given else "torch._inductor.config"
            if (key, where) not in _said:
                _said.add((key, where))
                asked.append(f"{key}, set in {where}")
    if asked:
        log.warning(message, "; ".join(asked))
