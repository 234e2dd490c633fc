"""Check that a scheduled graph is the same program, in an order that the old one allows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_passes.errors import InvariantError
from inductor_passes.graph.collectives import (
    argument,
    group_name,
    group_size,
    kind,
    payload_bytes,
    reduce_op,
)
from inductor_passes.graph.printing import user_line
from inductor_passes.schedule.apply import MergedLaunches
from inductor_passes.schedule.extract import Extracted
from inductor_passes.schedule.solver.problem import UNPACKED_OPS

aten = torch.ops.aten


@dataclass(frozen=True)
class Before:
    """Hold what a graph was before it was scheduled.

    ``calls``: what each node calls, and with what. ``behind``: the nodes that each must come after.
    ``launches``: what ranks must agree on for each launch, and its payload.
    """

    calls: dict[fx.Node, tuple[Any, Any, Any]]
    behind: dict[fx.Node, list[fx.Node]]
    launches: dict[fx.Node, tuple[tuple[Any, ...], int]]

    @classmethod
    def of(cls, extracted: Extracted) -> Before:
        """Snapshot of the graph that ``extracted`` was made from."""
        calls, behind, launches = {}, {}, {}
        for node, number in zip(extracted.nodes, extracted.problem.nodes, strict=True):
            if node is None:
                continue
            calls[node] = (node.target, node.args, node.kwargs)
            behind[node] = [_stands_for(extracted, d) for d in number.deps]
            if number.kind == "launch":
                launches[node] = (_identity(node), payload_bytes(node))
        return cls(calls, behind, launches)


def check(before: Before, graph: fx.Graph, buckets: Sequence[MergedLaunches], name: str) -> None:
    """Raise InvariantError unless ``graph`` computes what it did, in an order that allows it."""
    after = {node: i for i, node in enumerate(graph.nodes)}
    image: dict[fx.Node, fx.Node] = {}
    start: dict[fx.Node, fx.Node] = {}  # where a node that is gone begins, if not at its image
    for bucket in buckets:
        image.update(zip(bucket.waits, bucket.results, strict=True))
        image.update((member, bucket.launch) for member in bucket.members)
        start.update((wait, bucket.landed) for wait in bucket.waits)
    made = {node for bucket in buckets for node in bucket.made}
    for node in before.calls:
        if node not in after and node not in image:
            raise _broken(name, node, "it is lost")
        if node in after and node in image:
            raise _broken(name, node, "it stands beside the bucket that took its place")
    for node in after:
        if node not in before.calls and node not in made:
            raise _broken(name, node, "it is new and belongs to no bucket")
    for bucket in buckets:
        _check_bucket(before, bucket, image, name)
    for node, (target, args, kwargs) in before.calls.items():
        if node in image:
            continue
        # Every argument through the same map: a node whose input is gone must read exactly what
        # took its place.
        wanted = (target, *fx.map_arg((args, kwargs), lambda n: image.get(n, n)))
        if (node.target, node.args, node.kwargs) != wanted:
            raise _broken(name, node, "it calls something else")
    for node, behind in before.behind.items():
        # A bucket's wait is done where its first result lands, but its readers use the last of the
        # nodes that cut it up.
        at = after[start.get(node, image.get(node, node))]
        for other in behind:
            if after[image.get(other, other)] >= at:
                raise _broken(name, node, f"it stands before %{other.name}, which must come first")


def _check_bucket(
    before: Before, bucket: MergedLaunches, image: dict[fx.Node, fx.Node], name: str
) -> None:
    """The bucket moves its members' inputs, and nothing else, and hands each its own result."""
    launch = bucket.launch
    identities = {before.launches[member][0] for member in bucket.members}
    if identities != {_identity(launch)}:
        raise _broken(name, launch, f"it stands for launches of other kinds: {identities}")
    payload = sum(before.launches[member][1] for member in bucket.members)
    if payload_bytes(launch) != payload:
        raise _broken(name, launch, f"it moves {payload_bytes(launch)} bytes instead of {payload}")
    wanted = [
        fx.map_arg(before.calls[member][1][0], lambda n: image.get(n, n))
        for member in bucket.members
    ]
    reads, lands = (
        (_packed_inputs, _packed_slot)
        if isinstance(launch.args[0], fx.Node)
        else (lambda node: list(node.args[0]), _coalesced_slot)
    )
    if reads(launch) != wanted:
        raise _broken(name, launch, "it does not read its members' inputs in their order")
    offset = 0
    for i, (member, result) in enumerate(zip(bucket.members, bucket.results, strict=True)):
        value, found = member.meta["val"], result.meta["val"]
        if (value.shape, value.dtype) != (found.shape, found.dtype):
            raise _broken(name, result, f"it has shape {tuple(found.shape)}, not {value.shape}")
        rows = group_size(launch) if kind(launch) in UNPACKED_OPS else 1
        width = value.numel() // rows
        if lands(launch, result) not in (i, (rows, offset, width)):
            raise _broken(name, result, f"it is not the result of %{member.name}")
        offset += width


def _packed_inputs(launch: fx.Node) -> list[Any]:
    packed = launch.args[0]
    assert isinstance(packed, fx.Node)
    rows, axis = [-1], 0
    if kind(launch) in ("reduce_scatter", "all_to_all"):
        rows, axis = [group_size(launch), -1], 1
    if packed.target is not aten.cat.default or (*packed.args, 0)[1] != axis:
        return []
    parts = packed.args[0]
    assert isinstance(parts, (list, tuple))
    return [
        part.args[0]
        for part in parts
        if isinstance(part, fx.Node)
        and part.target is aten.reshape.default
        and part.args[1] == rows
    ]


def _packed_slot(launch: fx.Node, result: fx.Node) -> tuple[int, int, int] | None:
    """(rows, first column, columns) of the launch's result that ``result`` is."""
    chain = [result]
    for target in (
        aten.reshape.default,
        operator.getitem,
        aten.split_with_sizes.default,
        aten.reshape.default,
        torch.ops._c10d_functional.wait_tensor.default,
    ):
        source = chain[-1].args[0]
        if chain[-1].target is not target or not isinstance(source, fx.Node):
            return None
        chain.append(source)
    _, column, split, table, _, source = chain
    widths, index = split.args[1], column.args[1]
    if source is not launch or split.args[2] != 1:
        return None
    shape: Any = table.args[1]
    assert isinstance(widths, (list, tuple)) and isinstance(index, int)
    assert isinstance(widths, (list, tuple))
    sizes: list[Any] = [w.meta["val"] if isinstance(w, fx.Node) else w for w in widths]
    return int(shape[0]), sum(sizes[:index]), sizes[index]


def _coalesced_slot(launch: fx.Node, result: fx.Node) -> int | None:
    """Return the index of the launch's result that ``result`` waits for."""
    part = result.args[0]
    if not isinstance(part, fx.Node) or part.target is not operator.getitem:
        return None
    index = part.args[1]
    return index if part.args[0] is launch and isinstance(index, int) else None


def _identity(launch: fx.Node) -> tuple[Any, ...]:
    dtypes = {t.dtype for n in launch.all_input_nodes for t in _tensors(n.meta.get("val"))}
    return (
        kind(launch),
        group_name(launch),
        argument(launch, "group_size"),
        reduce_op(launch),
        frozenset(dtypes),
    )


def _tensors(value: object) -> list[torch.Tensor]:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _stands_for(extracted: Extracted, i: int) -> fx.Node:
    node = extracted.nodes[i]
    if node is None:  # a token stands for the node before it
        node = extracted.nodes[extracted.problem.nodes[i].deps[0]]
    assert node is not None
    return node


def _broken(name: str, node: fx.Node, what: str) -> InvariantError:
    line = user_line(node)
    return InvariantError(
        f"The pass {name} broke the graph at %{node.name}: {what}.",
        f"It is from {line}." if line else "",
        f"Report it, or leave the pass out with options={{'disable': ['{name}']}}.",
    )
