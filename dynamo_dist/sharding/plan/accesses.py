"""The memory that each operation reads and writes, as Inductor will fuse it with its neighbours.

The program is laid out as a graph of whole tensors, and the scheduler's own rule
(``inductor_passes/cost/memory_traffic.py``) says what reaches memory there. Shares of tensors carry over to any
placement: what is of equal size stays so on shards.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dynamo_dist.program import Access, Program, Ref, Value
from dynamo_dist.torch_compat import dtensor_placements
from inductor_passes.cost.flops import flops, is_attention, product_shape
from inductor_passes.cost.memory_traffic import Accesses, graph_accesses, value_behind


def accesses_of(program: Program, schemas: Sequence[Any]) -> list[Access | None]:
    """One per step; None for a step that is no operation, or whose arguments are not known."""
    layout = _Layout(program, schemas)
    found = graph_accesses(layout.graph)
    return [
        None if node is None else _access(node, layout.given[i], found[node])
        for i, node in enumerate(layout.calls)
    ]


class _Layout:
    """A program as an FX graph on whole tensors, and the call that each step is."""

    def __init__(self, program: Program, schemas: Sequence[Any]) -> None:
        self.graph = fx.Graph()
        self.calls: list[fx.Node | None] = []
        self.given: list[list[fx.Node]] = []
        self._nodes: dict[Ref, fx.Node] = {}
        for k, source in enumerate(program.sources):
            self._nodes[Ref(-1 - k)] = self._unknown(source.value)
        for i, (step, schema) in enumerate(zip(program.steps, schemas, strict=True)):
            given = [self._nodes[ref] for ref in step.inputs]
            call = None
            if step.kind == "op" and schema is not None:
                call = self._call(schema, given, step.outputs)
            self.calls.append(call)
            self.given.append(given)
            for o, value in enumerate(step.outputs):
                if value is None:
                    continue
                if call is None and step.kind != "op":
                    self._nodes[Ref(i, o)] = given[0]
                elif call is None:
                    self._nodes[Ref(i, o)] = self._unknown(value)
                elif len(step.outputs) == 1:
                    self._nodes[Ref(i, o)] = call
                else:
                    part = self.graph.call_function(operator.getitem, (call, o))
                    part.meta["val"] = call.meta["val"][o]
                    self._nodes[Ref(i, o)] = part
        # What nothing reads is a result, and so is what the program reads as a local tensor.
        local = [self._nodes[r] for s in program.steps if s.kind == "local" for r in s.inputs]
        unread = [n for n in self._nodes.values() if not n.users and n.op != "placeholder"]
        self.graph.output(tuple(dict.fromkeys([*local, *unread])))

    def _call(
        self, schema: Any, given: Sequence[fx.Node], outputs: Sequence[Value | None]
    ) -> fx.Node:
        left = iter(given)

        def argument(leaf: Any) -> Any:
            return next(left) if dtensor_placements.is_spec(leaf) else leaf

        args, kwargs = pytree.tree_map(argument, (schema.args_schema, schema.kwargs_schema))
        call = self.graph.call_function(schema.op, args, kwargs)
        values = [None if value is None else _meta(value) for value in outputs]
        call.meta["val"] = values[0] if len(values) == 1 else values
        return call

    def _unknown(self, value: Value) -> fx.Node:
        # Placeholders may stand anywhere: nobody runs this graph.
        node = self.graph.placeholder("unknown")
        node.meta["val"] = _meta(value)
        return node


def _access(node: fx.Node, given: Sequence[fx.Node], found: Accesses) -> Access:
    # Views of one value share what is read of it.
    whole: Counter[fx.Node] = Counter()
    for source in dict.fromkeys(given):
        whole[value_behind(source)] += _bytes(source.meta["val"])
    reads = []
    for source in given:
        value = value_behind(source)
        share = found.reads.get(value, 0.0) / max(whole[value], 1)
        reads.append(min(1.0, share / given.count(source)))
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    values = node.meta["val"]
    written = []
    for o, value in enumerate(values if isinstance(values, list) else [values]):
        made = parts.get(o, node) if isinstance(values, list) else node
        size = 0 if value is None else _bytes(value)
        written.append(min(1.0, found.writes.get(made, 0.0) / max(size, 1)))
    if None in found.writes:  # written in place: the first argument
        written[0] = min(1.0, found.writes[None] / max(_bytes(given[0].meta["val"]), 1))
    return Access(
        tuple(reads),
        tuple(written),
        found.starts_kernel,
        0.0 if product_shape(node) is not None else float(flops(node)),
        is_attention(node),
    )


def _meta(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
