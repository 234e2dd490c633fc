"""Pin the order of an FX graph, so that it survives Inductor's lowering.

Inductor's scheduler reorders for memory and fuses across launches; left alone it puts a launch
back in front of its wait. Upstream's ``control_deps`` ties nodes to others that must run first:
pinned are launches, waits, and the matrix products and reductions between them. Pointwise nodes
stay free, because tying one would force its value into memory and cost a fusion.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph.aliasing import op_facts
from inductor_passes.graph.collectives import is_launch, is_wait, waits_of
from inductor_passes.torch_compat import inductor

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
    """Return whether Inductor gives the node a kernel call of its own (a matrix product,
    attention ...).
    """
    if getattr(node.target, "namespace", "") == FUSED_NAMESPACE:
        return True
    return getattr(node.target, "overloadpacket", None) in OWN_KERNEL


def pin_order(graph: fx.Graph, cost: CostModel) -> int:
    """Tie launches, waits and the compute between them to their present order; count the ties.

    Runs last: the tied nodes become higher-order ops that no other pass looks into. A graph without
    a launch is left alone.
    """
    _wait_as_upstream(graph)
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
            # With nothing in flight the order of compute hides nothing, so a tie would only cost
            # compile time.
            if last is not None and to_come and not _reads(node, {last, *since}):
                after[node] = [last]
            since.append(node)
    if not any(is_launch(node) for node in graph.nodes):
        return 0
    # Before the ties: a tied node is wrapped and no longer recognised.
    _reduce_in_place(graph)
    inductor.pin_nodes(graph, after)
    return len(after)


def _reads(node: fx.Node, some: set[fx.Node]) -> bool:
    """Return whether the node's value is made, in a few steps, of one of ``some``: then it runs
    after it anyway.
    """
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


def _wait_as_upstream(graph: fx.Graph) -> None:
    """Wait by upstream's operator where nobody reads the wait's value.

    Inductor drops the value of any other, and with it what was to run after it. Upstream's gives
    what was launched where ours gives a token, and what is tied is lowered only if its stand-in
    says so.
    """
    for node in graph.nodes:
        if is_wait(node) and not node.users:
            node.target, node.args = c10d.wait_tensor.default, node.args[:1]
            (launch,) = node.all_input_nodes
            node.meta.update((key, launch.meta[key]) for key in _VALUE if key in launch.meta)


def _reduce_in_place(graph: fx.Graph) -> None:
    """Let an all_reduce overwrite an input that nobody else reads.

    Upstream's own pass for this runs after ours and cannot see into a tied node, which would cost a
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
