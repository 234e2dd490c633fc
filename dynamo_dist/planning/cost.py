"""Price a choice of placements: collectives, compute and memory that operations read and write.

The program is laid out as a graph of whole tensors, and the scheduler's own rule
(``inductor_passes.cost.compute.graph_accesses``) says what reaches memory there. Shares of tensors
carry over to any placement: what is of equal size stays so on shards.

The planner knows machines by the ``Prices`` protocol alone. All in microseconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch.utils import _pytree as pytree

from dynamo_dist.program import Access, Choice, MeshInfo, Program, Ref, Spec, Value
from dynamo_dist.torch_compat import dtensor_placements
from inductor_passes.cost import Topology, default_topology, load_topology
from inductor_passes.cost.collectives import shape_of_ranks
from inductor_passes.cost.compute import (
    Accesses,
    flops,
    graph_accesses,
    is_attention,
    product_shape,
    value_behind,
)
from inductor_passes.cost.machine import Machine


def accesses_of(program: Program, schemas: Sequence[object]) -> list[Access | None]:
    """One per step; None for a step that is no operation, or whose arguments are not known."""
    layout = _Layout(program, schemas)
    found = graph_accesses(layout.graph)
    return [
        None if node is None else _access(node, layout.given[i], found[node])
        for i, node in enumerate(layout.calls)
    ]


class _Layout:
    """A program as an FX graph on whole tensors, and the call that each step is."""

    def __init__(self, program: Program, schemas: Sequence[object]) -> None:
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

        def argument(leaf: object) -> Any:
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


INFINITE = math.inf


class Prices(Protocol):
    """A machine. Every rank must get the same answers."""

    def collective_us(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """One collective of the group ``ranks``; payload is one rank's input."""

    def product_us(self, dtype: str, shape: tuple[int, int, int, int], moved_bytes: float) -> float:
        """A matrix product of one rank; batch, m, k and n of [m, k] x [k, n]."""

    def kernel_us(
        self,
        moved_bytes: float,
        operations: float = 0.0,
        dtype: str = "float32",
        *,
        attention: bool = False,
        starts: bool = True,
    ) -> float:
        """Any other operation of one rank, by what it moves and computes; ``starts``: with a
        kernel's start.
        """

    def memory_us(self, moved_bytes: float) -> float:
        """Reading or writing device memory."""

    def digest(self) -> str:
        """A stable hash of everything that changes an answer."""


def local_shape(value: Value, spec: Spec, mesh: MeshInfo) -> tuple[int, ...]:
    """Shape of the largest shard."""
    shape = list(value.shape)
    for word, size in zip(spec, mesh.shape, strict=True):
        dim = shard_dim(word)
        if dim is not None and dim < len(shape):
            shape[dim] = math.ceil(shape[dim] / size)
    return tuple(shape)


def local_bytes(value: Value, spec: Spec, mesh: MeshInfo) -> float:
    """Bytes of the largest shard."""
    return math.prod(local_shape(value, spec, mesh)) * value.itemsize


def shard_dim(word: str) -> int | None:
    """The dimension of ``S<d>``; None for every other word."""
    return int(word[1:]) if word[0] == "S" and word[1:].isdigit() else None


def _holders(words: Sequence[str], dim: int) -> list[int]:
    return [i for i, word in enumerate(words) if shard_dim(word) == dim]


def is_partial(word: str) -> bool:
    """Return whether the word stands for sums not yet added up."""
    return word[0] == "P"


class Costs:
    """Costs of one program on one machine, remembered between calls."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program = program
        self.prices = prices
        self._moves: dict[tuple[Value, Spec, Spec, int], float] = {}

    def move_us(self, value: Value, source: Spec, target: Spec, mesh: int) -> float:
        """Redistribute ``value``; infinite where DTensor cannot or should not.

        Follows DTensor's order, one mesh dimension after another, innermost first; what would be
        sharded inside an outer shard that is not yet in place is gathered first and cut at the end.
        """
        if source == target:
            return 0.0
        key = (value, source, target, mesh)
        known = self._moves.get(key)
        if known is None:
            known = self._moves[key] = self._move_us(
                value, source, target, self.program.meshes[mesh]
            )
        return known

    def _move_us(self, value: Value, source: Spec, target: Spec, mesh: MeshInfo) -> float:
        now, total = list(source), 0.0
        if any(shard_dim(word) is not None for word in now):
            for d in reversed(range(len(now))):
                goal, dim = target[d], shard_dim(target[d])
                if dim is not None and _holders(now[:d], dim) != _holders(target[:d], dim):
                    goal = "R"
                total += self._step_us(value, now, d, goal, mesh)
                now[d] = goal
        for d in range(len(now)):
            total += self._step_us(value, now, d, target[d], mesh)
            now[d] = target[d]
        return total

    def _step_us(self, value: Value, now: list[str], d: int, goal: str, mesh: MeshInfo) -> float:
        word = now[d]
        if word == goal:
            return 0.0
        payload = local_bytes(value, tuple(now), mesh)
        if is_partial(goal):  # a replicated value is shared out as summands: nothing is sent
            return self.prices.memory_us(2 * payload) if word == "R" else INFINITE
        if word == "R":  # each rank cuts its own part
            return 0.0
        if is_partial(word):
            kind = "all_reduce" if goal == "R" else "reduce_scatter"
        else:
            kind = "all_gather" if goal == "R" else "all_to_all"
        return self.prices.collective_us(kind, payload, mesh.groups[d]) + self._copy_us(
            kind, word, goal, payload, mesh.shape[d]
        )

    def _copy_us(self, kind: str, word: str, goal: str, payload: float, size: int) -> float:
        """Packing for collectives that cut or join another dimension than the first."""
        dim = shard_dim(word if kind == "all_gather" else goal)
        if kind == "all_reduce" or (kind != "all_to_all" and dim == 0):
            return 0.0
        return self.prices.memory_us(2 * payload * (size if kind == "all_gather" else 1))

    def compute_us(self, index: int, choice: Choice) -> float:
        """Step ``index`` on the largest shards, fused with its neighbours where nothing moves
        between them.
        """
        step = self.program.steps[index]
        if step.kind != "op":
            return 0.0
        mesh = self.program.meshes[step.mesh]
        outs = [
            (value, spec)
            for value, spec in zip(step.outputs, choice.outputs, strict=True)
            if value is not None and spec is not None
        ]
        if not outs or is_view(step.text):
            return 0.0
        access = self.program.access(index)
        given = [self.program.value(ref) for ref in step.inputs]
        moved = sum(
            share * local_bytes(value, spec, mesh)
            for share, value, spec in zip(access.reads, given, choice.inputs, strict=True)
        ) + sum(
            share * local_bytes(value, spec, mesh)
            for share, value, spec in zip(access.writes, step.outputs, choice.outputs, strict=True)
            if value is not None and spec is not None
        )
        dtype = given[0].dtype if given else outs[0][0].dtype
        if is_matmul(step.text) and len(given) >= 2:
            left, right = (
                local_shape(value, spec, mesh)
                for value, spec in zip(given[-2:], choice.inputs[-2:], strict=True)
            )
            shape = math.prod(left[:-2]), left[-2], left[-1], right[-1]
            return self.prices.product_us(dtype, shape, moved)
        return self.prices.kernel_us(
            moved,
            access.operations * _share_of_work(choice, mesh),
            dtype,
            attention=access.attention,
            starts=access.starts_kernel,
        )

    def apart_us(self, index: int, argument: int, source: Spec, target: Spec) -> float:
        """Return the cost of an input that has to be moved and so cannot stay inside a kernel: a
        write and a read.
        """
        step = self.program.steps[index]
        if step.kind != "op" or is_view(step.text):
            return 0.0
        access = self.program.access(index)
        value, mesh = self.program.value(step.inputs[argument]), self.program.meshes[step.mesh]
        size = local_bytes(value, source, mesh) + local_bytes(value, target, mesh)
        return self.prices.memory_us((1.0 - access.reads[argument]) * size)


def _share_of_work(choice: Choice, mesh: MeshInfo) -> float:
    """The part of an operation that one rank does: every dimension over which an input is cut
    divides it.
    """
    share = 1.0
    for d, size in enumerate(mesh.shape):
        if any(shard_dim(spec[d]) is not None for spec in choice.inputs):
            share /= size
    return share


_MATMULS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")
_VIEWS = (
    "view _unsafe_view t transpose permute expand unsqueeze squeeze detach alias split slice "
    "select reshape unbind split_with_sizes"
).split()


def is_matmul(text: str) -> bool:
    """Return whether the step's op is a matrix product."""
    return text.startswith(_MATMULS)


def is_view(text: str) -> bool:
    """Return whether the step's op moves nothing."""
    return text.startswith("aten.") and text.split(".")[1] in _VIEWS


RULES = 2  # how work becomes figures: plans made by other rules are made anew


class TopologyPrices(Machine):
    """A machine in a job of ``world`` ranks. Implements ``Prices``."""

    __slots__ = ("world",)

    def __init__(self, topology: Topology, world: int) -> None:
        super().__init__(topology)
        self.world = world

    def collective_us(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        shape = shape_of_ranks(ranks, self.topology.ranks_per_node, self.world)
        return self.call_us(kind, [payload_bytes], shape)

    def digest(self) -> str:
        """Of the figures and the size of the job: the same on every rank, so that a plan is made
        once.
        """
        figures = dataclasses.asdict(self.topology)
        del figures["sources"]
        text = json.dumps([RULES, figures, self.world], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def prices_of(topology: str | None, inputs: Sequence[object]) -> Prices:
    """Return the planner's prices: of the topology named, or of the default for the device of
    the inputs.
    """
    devices = (given.device.type for given in inputs if isinstance(given, torch.Tensor))
    named = topology or default_topology(next(devices, "cpu"))
    return TopologyPrices(load_topology(named), dist.get_world_size())
