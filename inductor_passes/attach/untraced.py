"""A program that Dynamo has traced and AOTAutograd has not: what tells whether other ranks have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.attach.alike import graphs_inside
from inductor_passes.attach.uneven import leaves_of_value
from inductor_passes.torch_compat import config, meshes, rank_reads
from inductor_passes.torch_compat.operators import higher_order_name, is_random, namespace
from inductor_passes.torch_compat.sizes import size_hint

# Operators that are torch's or ours: what AOTAutograd runs of others may read anything.
_NAMESPACES = {
    *("aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd"),
    *("device_mesh", "_dtensor", "dynamo_dist", "dynamo_dist_parallel", "inductor_passes"),
}


class UntracedProgram:
    """A Dynamo graph and its inputs, fake or real, local in DTensors."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._gm, self._inputs = gm, inputs

    def is_known(self) -> bool:
        """Return whether nothing of users runs while the graph is traced again: operators, layouts of operators."""
        return (
            rank_reads.can_notice()
            and all(rank_reads.is_known(type(each)) for each in self._inputs)
            and all(_is_known(node) for graph in graphs_inside(self._gm) for node in graph.nodes)
            and rank_reads.strategies_are_known()
        )

    def digest(self, key: str, *facts: object) -> str:
        """Return a digest of torch's ``key`` of it without the rank, and of what is not in that: ``facts``, hints, shards, options."""
        inputs = [_text(each) for each in self._inputs]
        return hashlib.sha256(repr((key, facts, inputs, config.digests())).encode()).hexdigest()

    def meshes(self) -> dict[str, DeviceMesh]:
        """Meshes that are met in it, by what they hold beside the rank's place."""
        found = list(self._inputs)
        for graph in graphs_inside(self._gm):
            found += [node.meta.get("example_value") for node in graph.nodes]
        of_values = (_mesh(each) for value in found for each in leaves_of_value(value))
        return {meshes.content(mesh, of_rank=False): mesh for mesh in of_values if mesh is not None}


def draws_numbers(gm: fx.GraphModule) -> bool:
    """Return whether a graph of operators draws random numbers: what ranks draw is looked at as each traces."""
    return any(is_random(node.target) for graph in graphs_inside(gm) for node in graph.nodes)


def _is_known(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_module":
        owner = node.graph.owning_module
        return owner is not None and isinstance(owner.get_submodule(target), fx.GraphModule)
    if node.op != "call_function":
        return True
    if (name := namespace(target)) is not None:
        return name in _NAMESPACES
    is_operator = higher_order_name(target) is not None
    return rank_reads.is_known(type(target) if is_operator else target)


def _text(value: Any) -> str:
    """Return what torch's key leaves out of an input: the hint of a symbol, the local part of a DTensor."""
    if isinstance(value, torch.SymInt):
        return f"{value} {size_hint(value)}"
    tensor = meshes.local_of(value)
    if not isinstance(tensor, torch.Tensor):
        return type(value).__name__
    sizes = [
        f"{size} {size_hint(size)}" if isinstance(size, torch.SymInt) else str(size)
        for size in (*tensor.shape, *tensor.stride())
    ]
    return f"{type(value).__name__} {sizes} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


def _mesh(value: object) -> DeviceMesh | None:
    spec = meshes.spec_of(value)
    return meshes.mesh_of(value if spec is None else spec.mesh)
