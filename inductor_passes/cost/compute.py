"""Count the floating-point operations and the memory traffic of each node.

Formulas are those of ``torch.utils.flop_counter`` (a user's own ``register_flop_formula`` counts
too), evaluated on the hints of symbolic sizes. What its registry lacks or counts wrongly is here.

Which values reach memory is Inductor's choice, made after our passes. The rule used here, which
looks at the graph's edges only and never at the order of its nodes:

- A node is *fusible* if it is pointwise (elementwise, factory, indexing) or a reduction. Its
  iteration size is the number of elements it computes, for a reduction the number it reads.
- Its *depth* is the largest number of nodes on any path to it that end a kernel: all that are not
  fusible (matrix products, launches, waits ...) and long reductions to few elements, which Inductor
  splits. Two fusible nodes joined by an edge share a kernel if their depths are equal, so nothing
  in between has to run first, and their iteration sizes fit: equal, or a small operand is
  broadcast. A value that is read in part is not fused.
- A use in such a shared kernel reads nothing, and a value with no other use is not written. All
  other values are written once, and read once by each kernel: readers of equal depth and size count
  as one kernel and share the read evenly.

Views are free, and a broadcast value is read once per distinct element. Embedding and gather read
what they pick, not the table. A node that writes memory starts a kernel. What ends the graph as
the new value of an input, such as an updated parameter, is computed in the input's memory: the copy
into it is free, and the value counts as written.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from inductor_passes.graph.aliasing import is_view, mutated_inputs, written_to_input
from inductor_passes.graph.collectives import role
from inductor_passes.graph.node_kinds import NodeKind, distinct_bytes, loop_of, node_kinds, tensors
from inductor_passes.torch_compat.nodes import size_hint

log = logging.getLogger(__name__)
# Operators whose formula has failed: each is warned of once in a process.
_warned: set[str] = set()

_PLAIN_MM = frozenset(("mm", "addmm", "bmm", "baddbmm"))
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


def is_attention(node: fx.Node) -> bool:
    """Return whether ``node`` is a fused attention kernel, forward or backward."""
    return op_name(node).startswith(_ATTENTION)


def op_name(node: fx.Node) -> str:
    """``mm``, ``convolution_backward``, ``flex_attention`` ...; "" where the node calls no
    operator.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return ""


def flops(node: fx.Node) -> float:
    """Multiplications and additions of one node on this rank (local shapes)."""
    target = node.target
    if loop_of(target) != "none":
        return 0  # bound by memory, and by far the most frequent
    name = op_name(node)
    if name in _PLAIN_MM:
        return 2 * math.prod(product_shape(node) or (0,))
    formula: Callable[..., Any] | None = _OWN.get(name)
    if formula is None:
        # The registry is by packet: a formula holds for all overloads.
        packet = target._overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        formula = _registry().get(packet)
    if formula is None:
        return 0
    try:
        args, kwargs, out = concrete((node.args, dict(node.kwargs), node.meta.get("val")))
        count = formula(*args, **kwargs, out_val=out)
    except Exception as error:  # a formula may be a third party's
        if (operator := str(target)) not in _warned:
            _warned.add(operator)
            log.warning(
                "The flop formula of %s raised %s: %s. The cost model takes its memory traffic "
                "alone, so that schedules may hide too little behind it.",
                operator,
                type(error).__name__,
                error,
            )
        return 0
    # Torch's formulas count the whole score matrix. Causal kernels skip the blocks above the
    # diagonal.
    if is_attention(node):
        count = count * _causal_share(node)
    return int(count)


def _registry() -> dict[Any, Callable[..., Any]]:
    # Not at the top: it logs a warning where a CUDA build has no Triton, and an import should not.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def concrete(value: Any) -> Any:
    """Nodes as their values, symbolic sizes as their hints, tensors as meta tensors."""
    if isinstance(value, fx.Node):
        return concrete(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        # Meta tensors, not the fake ones: their shapes have symbols, and a formula that compares
        # them would add guards.
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (list, tuple)):
        return [concrete(item) for item in value]
    if isinstance(value, dict):
        return {key: concrete(item) for key, item in value.items()}
    return value


def _causal_share(node: fx.Node) -> float:
    """Part of the score matrix that a causal kernel computes: row i sees the first i + 1
    columns.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 1.0
    tensors = {}
    for position, argument in enumerate(target._schema.arguments):
        passed = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        )
        if argument.name == "is_causal" and not (
            argument.default_value if passed is None else passed
        ):
            return 1.0
        if argument.name in ("query", "key", "is_causal"):
            tensors[argument.name] = passed
    query, key = concrete(tensors.get("query")), concrete(tensors.get("key"))
    if "is_causal" not in tensors or query is None or key is None or query.dim() != 4:
        return 1.0
    rows, columns = query.shape[-2], key.shape[-2]
    # The first ``full`` rows see 1, 2, ... columns; rows beyond the last column see all of them.
    full = min(rows, columns)
    seen = full * (full + 1) / 2 + max(0, rows - columns) * columns
    return seen / (rows * columns) if rows and columns else 1.0


def _mm(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    """[m, k] x [k, n], or a batch of either side; grouped products count each row of ``a`` once."""
    if a.dim() == 2 and b.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if a.dim() == 3 and b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def product_shape(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Batch, m, k and n of [m, k] x [k, n] for mm, addmm, bmm and baddbmm; None for every other
    node.

    Almost all products of a graph, so read without meta tensors.
    """
    if op_name(node) not in _PLAIN_MM:
        return None
    shapes = []
    for source in node.args[-2:]:
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return None
        shapes.append([size_hint(size) for size in value.shape])
    *batch, m, k = shapes[0]
    return math.prod(batch), m, k, shapes[1][-1]


def _second_mm(_bias: object, a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    return _mm(a, b)


def _mv(a: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * a.numel()


def _second_mv(_bias: object, a: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * a.numel()


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight.shape[0]


def _attention(*args: object, **kwargs: object) -> float:
    formula = _registry()[torch.ops.aten._scaled_dot_product_flash_attention]
    return cast(float, formula(*args[:3], out_val=kwargs["out_val"]))


def _attention_backward(*args: object, **kwargs: object) -> float:
    formula = _registry()[torch.ops.aten._scaled_dot_product_flash_attention_backward]
    return cast(float, formula(*args[:4], out_val=kwargs["out_val"]))


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    output_mask: list[bool],
    **_: object,
) -> int:
    """Gradients of input and weight cost what the forward does, each.

    The upstream formula forgets that groups divide the weight's gradient.
    """
    spatial = (x if transposed else grad).shape[2:]
    forward = 2 * grad.shape[0] * math.prod(spatial) * weight.numel()
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


_OWN: dict[str, Callable[..., float]] = {
    "_int_mm": _mm,
    "_grouped_mm": _mm,
    "_scaled_grouped_mm": _mm,
    "_scaled_grouped_mm_v2": _mm,
    "_scaled_mm_v2": _mm,
    "_addmm_activation": _second_mm,
    "mv": _mv,
    "addmv": _second_mv,
    "dot": _mv,
    "vdot": _mv,
    "linear": _linear,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}


_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))


class Traffic(NamedTuple):
    """Bytes one node reads and writes, and whether a kernel starts at it."""

    read_bytes: float
    write_bytes: float
    starts_kernel: bool


class Accesses(NamedTuple):
    """The traffic of one node, value by value.

    ``reads``: bytes read of each value, views resolved. ``writes``: bytes written of the node's
    value or of its parts, under the node that stands for them; under None, what it writes of its
    inputs.
    """

    reads: dict[fx.Node, float]
    writes: dict[fx.Node | None, float]
    starts_kernel: bool


def graph_traffic(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Traffic of every node. Linear in nodes and edges; does not depend on the order of the
    nodes.
    """
    return {
        node: Traffic(
            sum(found.reads.values(), 0.0), sum(found.writes.values(), 0.0), found.starts_kernel
        )
        for node, found in graph_accesses(graph).items()
    }


def graph_accesses(graph: fx.Graph) -> dict[fx.Node, Accesses]:
    """The same, value by value."""
    kinds = node_kinds(graph)
    # How many readers of a value one kernel has: they share a read.
    sharers: Counter[tuple[fx.Node, int, int]] = Counter()
    reads: dict[fx.Node, dict[fx.Node, int]] = {}
    written: set[fx.Node] = set()
    used: set[fx.Node] = set()
    copied = {node: value_behind(value) for node in kinds if (value := written_to_input(node))}
    in_place = {node: value for node, value in copied.items() if kinds[value].fusible}
    written.update(in_place.values())
    for node, kind in kinds.items():
        if node in in_place:
            continue
        # Outputs and launches do no arithmetic, but what they read has to be in memory: they end a
        # fusion.
        if kind.free and node.op != "output" and role(node) != "launch":
            continue
        reads[node] = found = _values_read(node, kinds)
        used.update(found)
        for value, size in found.items():
            if _fused(value, node, size, kinds):
                # Inside one kernel the value stays in registers.
                found[value] = 0
                continue
            written.add(value)
            if kind.fusible:
                sharers[value, kind.depth, kind.iterations] += 1
    result = {}
    for node, kind in kinds.items():
        if kind.free or node in in_place:
            result[node] = Accesses({}, {}, False)
            continue
        fusible = kind.fusible
        read: dict[fx.Node, float] = {}
        for value, size in reads[node].items():
            shared = sharers[value, kind.depth, kind.iterations] if fusible else 1
            # Fusible readers of equal depth and size become one kernel that loads the value once.
            # Each gets an even share, so that the sum over nodes is right whatever their order.
            read[value] = size / (shared or 1)
        write: dict[fx.Node | None, float] = {}
        for written_as, size in _values_written(node, kind):
            # Read, and by nobody outside of its kernel: never written. What nobody reads counts as
            # written.
            inside = fusible and written_as in used and written_as not in written
            write[written_as] = write.get(written_as, 0.0) + (0 if inside else size)
        result[node] = Accesses(read, write, any(write.values()) or not fusible)
    return result


def value_behind(node: fx.Node) -> fx.Node:
    """The value that a node is a view of; itself if it is none."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _fused(value: fx.Node, reader: fx.Node, size: int, kinds: dict[fx.Node, NodeKind]) -> bool:
    """Return whether ``reader`` gets ``value`` inside one kernel, without memory in between."""
    producer, consumer = kinds[value], kinds[reader]
    # Different depths: another kernel must run in between. Read in part: Inductor does not fuse it.
    if not producer.fusible or producer.depth != consumer.depth or size < producer.bytes:
        return False
    loop = loop_of(reader.target)
    if loop == "cat":
        # Inductor computes a part of a concatenation in place, where nothing else needs it.
        return producer.pointwise and len(value.users) == 1
    if loop == "picking" or not consumer.fusible:
        return False
    if producer.reduction:
        # Inductor fuses what follows a reduction into its loop where it runs over the reduced or
        # over the full range, as a norm does.
        return consumer.pointwise and consumer.iterations in (
            producer.elements,
            producer.iterations,
        )
    # Equal loops fuse; a smaller operand is computed again inside the larger loop if it is
    # broadcast over it, which needs whole multiples.
    return producer.elements == consumer.iterations or (
        producer.elements < consumer.iterations
        and consumer.iterations % max(producer.elements, 1) == 0
    )


def _values_read(node: fx.Node, kinds: dict[fx.Node, NodeKind]) -> dict[fx.Node, int]:
    """Values that the node reads, views resolved, with the bytes read of each."""
    found: dict[fx.Node, int] = {}
    sources = node.all_input_nodes
    if op_name(node) in _OVERWRITING:
        # ``copy_`` and its like overwrite their target without reading it.
        sources = [source for source in sources if source not in mutated_inputs(node)]
    picks = loop_of(node.target) == "picking"
    for position, source in enumerate(sources):
        size = kinds[source].bytes
        if picks and position == 0:
            # An embedding reads the rows that it picks, not the table.
            size = min(size, kinds[node].bytes)
        value = value_behind(source)
        if value is not source or value in found:
            # Two views of one value together read no more than the value.
            size = min(found.get(value, 0) + size, kinds[value].bytes)
        found[value] = size
    return found


def _values_written(node: fx.Node, kind: NodeKind) -> Iterator[tuple[fx.Node | None, int]]:
    """Bytes written, each with the node whose users read them; None for an overwritten input."""
    mutated = mutated_inputs(node)
    if mutated:
        for target in mutated:
            yield None, sum(distinct_bytes(t) for t in tensors(target.meta.get("val")))
        return
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node, kind.bytes
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for index, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(item, torch.Tensor):
            yield parts.get(index, node), distinct_bytes(item)
