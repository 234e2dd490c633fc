"""Tell how Inductor will treat each node of a graph: free, part of a loop, or a kernel of its
own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Literal

import torch
from torch import fx

from inductor_passes.graph.aliasing import is_view, per_operator
from inductor_passes.graph.collectives import role
from inductor_passes.torch_compat.nodes import is_reduction, size_hint

Loop = Literal["pointwise", "picking", "reduction", "cat", "no memory", "none"]

# Ops that Inductor lowers to a pointwise loop although torch does not tag them so.
_POINTWISE = frozenset(
    "_to_copy copy copy_ full full_like zeros zeros_like ones ones_like new_zeros new_ones "
    "new_full scalar_tensor arange iota rand randn bernoulli native_dropout "
    "inductor_random inductor_seeds inductor_lookup_seed constant_pad_nd select_scatter "
    "slice_scatter fill_ zero_ bucketize flip repeat roll tril triu".split()
)
_PICKING = frozenset(
    "embedding gather index index_select _unsafe_index _unsafe_masked_index".split()
)
_REDUCTIONS = frozenset(
    "sum mean amax amin max min prod var var_mean std std_mean any all argmax argmin "
    "logsumexp".split()
)
_NO_MEMORY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
# torch/_inductor/choices.py, reduction_split_factor: more than 8192 elements to fewer results than
# twice the multiprocessors (132 on the GPUs whose topologies we ship).
_SPLIT_LENGTH, _SPLIT_RESULTS = 8192, 264


class NodeKind:
    """One node. ``elements`` and ``bytes`` are of its value, broadcast elements counted once in
    bytes.

    ``free`` nodes take no time. ``pointwise`` and ``reduction`` nodes are loops over ``iterations``
    elements. ``split`` marks a reduction that ends its kernel. ``depth`` counts kernel ends before
    it.
    """

    __slots__ = (
        "bytes",
        "depth",
        "elements",
        "free",
        "iterations",
        "pointwise",
        "reduction",
        "split",
    )

    def __init__(self, depth: int, elements: int, size: int) -> None:
        self.free = True
        self.pointwise = self.reduction = self.split = False
        self.depth, self.iterations = depth, 0
        self.elements, self.bytes = elements, size

    @property
    def fusible(self) -> bool:
        """Return whether the node is a loop that can share a kernel with others."""
        return self.pointwise or self.reduction

    @property
    def depth_after(self) -> int:
        """Depth of what uses the node's value."""
        ends = not self.free and (self.split or not self.fusible)
        return self.depth + ends


def node_kinds(graph: fx.Graph) -> dict[fx.Node, NodeKind]:
    """The kind of every node. Linear in nodes and edges."""
    kinds: dict[fx.Node, NodeKind] = {}
    for node in graph.nodes:
        depth = largest_input = 0
        for source in node.all_input_nodes:
            depth = max(depth, kinds[source].depth_after)
            largest_input = max(largest_input, kinds[source].elements)
        kind = kinds[node] = NodeKind(depth, *_measure(node.meta.get("val")))
        if node.op != "call_function" or is_view(node):
            continue
        if node.target is operator.getitem:
            if isinstance(node.args[0], fx.Node):
                _part_of(kind, kinds[node.args[0]])
        elif role(node) in ("launch", "wait"):
            # Whatever comes after has to wait for it, as after a kernel of another kind.
            kind.depth = depth + 1
        else:
            _compute_kind(kind, loop_of(node.target), largest_input)
    return kinds


@per_operator
def loop_of(target: object) -> Loop:
    """Return the kind of loop that Inductor makes of an operator, by its tags and its name."""
    if not isinstance(target, torch._ops.OpOverload):
        return "none"
    name, tags = target._opname, target.tags
    if name in _NO_MEMORY:
        return "no memory"
    if name == "cat":
        return "cat"
    if name in _PICKING:
        return "picking"
    if name in _REDUCTIONS or is_reduction(target):
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in tags or name in _POINTWISE else "none"


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes in memory; elements repeated by broadcasting count once."""
    return _tensor_size(tensor)[1]


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors of a node's value: one, or those of a list."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _compute_kind(kind: NodeKind, loop: Loop, largest_input: int) -> None:
    if not kind.elements or loop == "no memory":
        return
    kind.free = False
    if loop == "reduction" and largest_input > kind.elements:
        kind.reduction, kind.iterations = True, largest_input
        # Inductor splits such a reduction over two kernels, so what reads it is in another one.
        kind.split = (
            kind.elements < _SPLIT_RESULTS and largest_input > _SPLIT_LENGTH * kind.elements
        )
    elif loop in ("pointwise", "picking", "reduction"):
        kind.pointwise, kind.iterations = True, kind.elements


def _part_of(part: NodeKind, whole: NodeKind) -> None:
    """Part of a several-output node: that node's kind, but it moves nothing itself."""
    part.pointwise, part.reduction, part.split = whole.pointwise, whole.reduction, whole.split
    part.depth, part.iterations = whole.depth_after, whole.iterations


def _measure(value: object) -> tuple[int, int]:
    """Elements of the largest tensor, distinct bytes of all."""
    if isinstance(value, torch.Tensor):
        return _tensor_size(value)
    sizes = [_tensor_size(tensor) for tensor in tensors(value)]
    return max((count for count, _ in sizes), default=0), sum(size for _, size in sizes)


def _tensor_size(tensor: torch.Tensor) -> tuple[int, int]:
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not all(type(size) is int for size in (*shape, *strides)):
        shape, strides = tuple(map(size_hint, shape)), tuple(map(size_hint, strides))
    count = distinct = math.prod(shape)
    if 0 in strides:
        distinct = math.prod(
            size for size, stride in zip(shape, strides, strict=True) if stride != 0
        )
    return count, distinct * tensor.dtype.itemsize
