"""Bytes that each node moves through device memory, with Inductor's fusion taken into account.

Which values reach memory is Inductor's choice, made after our passes. The rule used here, which looks
at the graph's edges only and never at the order of its nodes:

- A node is *fusible* if it is pointwise (elementwise, factory, indexing) or a reduction. Its iteration
  size is the number of elements it computes, for a reduction the number it reads.
- Its *depth* is the largest number of nodes on any path to it that end a kernel: all that are not
  fusible (matrix products, launches, waits ...) and long reductions to few elements, which Inductor
  splits. Two fusible nodes joined by an edge share a kernel if their depths are equal, so nothing in
  between has to run first, and their iteration sizes fit: equal, or a small operand is broadcast. A
  value that is read in part is not fused.
- A use in such a shared kernel reads nothing, and a value with no other use is not written. All other
  values are written once, and read once by each kernel: readers of equal depth and size count as one
  kernel and share the read evenly.

Views are free, and a broadcast value is read once per distinct element. Embedding and gather read what
they pick, not the table. A node that writes memory starts a kernel.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes._torch import size_hint
from inductor_passes.collectives import is_launch, is_wait
from inductor_passes.cost.aliasing import is_view, mutated_inputs
from inductor_passes.cost.flops import op_name

# Ops that Inductor lowers to a pointwise loop although torch does not tag them so.
_POINTWISE = frozenset(
    "_to_copy copy copy_ full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full "
    "scalar_tensor arange iota rand randn bernoulli native_dropout inductor_random inductor_seeds "
    "inductor_lookup_seed constant_pad_nd select_scatter slice_scatter fill_ zero_ bucketize flip "
    "repeat roll tril triu".split()
)
_PICKING = frozenset(
    "embedding gather index index_select _unsafe_index _unsafe_masked_index".split()
)
_REDUCTIONS = frozenset(
    "sum mean amax amin max min prod var var_mean std std_mean any all argmax argmin logsumexp".split()
)
_NO_MEMORY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
# torch/_inductor/choices.py, reduction_split_factor: more than 8192 elements to fewer results than twice
# the multiprocessors (132 on the GPUs whose topologies we ship).
_SPLIT_LENGTH, _SPLIT_RESULTS = 8192, 264
_TAG_REDUCTION = getattr(torch.Tag, "reduction", None)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes one node reads and writes, and whether a kernel starts at it."""

    read_bytes: float
    write_bytes: float
    starts_kernel: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """How Inductor treats a node: free, part of a loop, or a kernel of its own."""

    free: bool
    pointwise: bool = False
    reduction: bool = False
    split: bool = False
    depth: int = 0
    iterations: int = 0

    @property
    def fusible(self) -> bool:
        return self.pointwise or self.reduction

    @property
    def depth_after(self) -> int:
        return self.depth + (not self.free and (self.split or not self.fusible))


def graph_traffic(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Traffic of every node. Linear in nodes and edges; does not depend on the order of the nodes."""
    kinds = _kinds(graph)
    # How many readers of each value a kernel has: they share one read.
    sharers: dict[fx.Node, Counter[tuple[int, int]]] = {}
    reads: dict[fx.Node, dict[fx.Node, int]] = {}
    written = {node for node in kinds if not kinds[node].fusible}
    for node, kind in kinds.items():
        if kind.free and node.op != "output" and not is_launch(node):
            continue
        reads[node] = _values_read(node)
        for value, size in reads[node].items():
            if _fused(value, node, size, kinds):
                reads[node][value] = 0
                continue
            written.add(value)
            sharers.setdefault(value, Counter())[_kernel(kind)] += 1
    used = {value for values in reads.values() for value in values}
    result = {}
    for node, kind in kinds.items():
        if kind.free:
            result[node] = Traffic(0.0, 0.0, False)
            continue
        read = sum(
            size / (sharers[value][_kernel(kind)] if kind.fusible else 1)
            for value, size in reads[node].items()
            if size
        )
        write = sum(
            distinct_bytes(tensor)
            for value, tensor in _values_written(node)
            if value is None or value in written or value not in used
        )
        result[node] = Traffic(read, float(write), write > 0 or not kind.fusible)
    return result


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor, elements repeated by broadcasting counted once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size_hint(stride) != 0:
            count *= size_hint(size)
    return count * tensor.dtype.itemsize


def _kinds(graph: fx.Graph) -> dict[fx.Node, _Kind]:
    kinds: dict[fx.Node, _Kind] = {}
    for node in graph.nodes:
        inputs = [kinds[source] for source in node.all_input_nodes]
        depth = max((k.depth_after for k in inputs), default=0)
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and not is_view(node) and source in kinds:
                # Part of a several-output node: that node's kind, but it moves nothing itself.
                origin = kinds[source]
                kinds[node] = dataclasses.replace(origin, free=True, depth=origin.depth_after)
            else:
                kinds[node] = _Kind(True, depth=depth)
        elif is_launch(node) or is_wait(node):
            # Whatever comes after has to wait for it, as after a kernel of another kind.
            kinds[node] = _Kind(True, depth=depth + 1)
        else:
            kinds[node] = _compute_kind(node, depth)
    return kinds


def _compute_kind(node: fx.Node, depth: int) -> _Kind:
    target, name = node.target, op_name(node)
    if not list(_tensors(node.meta.get("val"))) or name in _NO_MEMORY:
        return _Kind(True, depth=depth)
    if not isinstance(target, torch._ops.OpOverload):
        return _Kind(False, depth=depth)
    largest_input = max(
        (_numel(t) for i in node.all_input_nodes for t in _tensors(i.meta.get("val"))), default=0
    )
    out = max(_numel(tensor) for tensor in _tensors(node.meta["val"]))
    if name in _REDUCTIONS or _TAG_REDUCTION in target.tags:
        if largest_input > out:
            split = out < _SPLIT_RESULTS and largest_input > _SPLIT_LENGTH * out
            return _Kind(False, reduction=True, split=split, depth=depth, iterations=largest_input)
        return _Kind(False, pointwise=True, depth=depth, iterations=out)
    if torch.Tag.pointwise in target.tags or name in _POINTWISE or name in _PICKING:
        return _Kind(False, pointwise=True, depth=depth, iterations=out)
    return _Kind(False, depth=depth)


def _fused(value: fx.Node, reader: fx.Node, size: int, kinds: dict[fx.Node, _Kind]) -> bool:
    """Whether ``reader`` gets ``value`` inside one kernel, without memory in between."""
    producer, consumer = kinds[value], kinds[reader]
    if not producer.fusible or producer.depth != consumer.depth:
        return False
    tensor = next(_tensors(value.meta.get("val")), None)
    if tensor is None or size < distinct_bytes(tensor):
        return False
    count = _numel(tensor)
    if op_name(reader) == "cat":
        # Inductor computes a part of a concatenation in place, where nothing else needs it.
        return producer.pointwise and len(value.users) == 1
    if op_name(reader) in _PICKING or not consumer.fusible:
        return False
    if producer.reduction:
        return consumer.pointwise and consumer.iterations in (count, producer.iterations)
    return count == consumer.iterations or (
        count < consumer.iterations and consumer.iterations % max(count, 1) == 0
    )


def _kernel(kind: _Kind) -> tuple[int, int]:
    return kind.depth, kind.iterations


def _values_read(node: fx.Node) -> dict[fx.Node, int]:
    """Values that the node reads, views resolved, with the bytes read of each."""
    found: dict[fx.Node, int] = {}
    skipped = set(mutated_inputs(node)) if op_name(node) in ("copy_", "fill_", "zero_") else set()
    picks = op_name(node) in _PICKING
    for position, source in enumerate(node.all_input_nodes):
        if source in skipped:
            continue
        size = sum(distinct_bytes(tensor) for tensor in _tensors(source.meta.get("val")))
        if picks and position == 0:
            size = min(size, sum(distinct_bytes(t) for t in _tensors(node.meta.get("val"))))
        value = source
        while is_view(value) and isinstance(value.args[0], fx.Node):
            value = value.args[0]
        found[value] = found.get(value, 0) + size
    for value, size in found.items():
        # Two views of one value together read no more than the value.
        whole = sum(distinct_bytes(tensor) for tensor in _tensors(value.meta.get("val")))
        found[value] = min(size, whole) if whole else size
    return found


def _values_written(node: fx.Node) -> Iterator[tuple[fx.Node | None, torch.Tensor]]:
    """Fresh tensors of a node, each with the node that stands for it; None for an overwritten input."""
    mutated = mutated_inputs(node)
    if mutated:
        for target in mutated:
            for tensor in _tensors(target.meta.get("val")):
                yield None, tensor
        return
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node, value
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for index, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(item, torch.Tensor):
            yield parts.get(index, node), item


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _numel(tensor: torch.Tensor) -> int:
    return math.prod(size_hint(size) for size in tensor.shape)
