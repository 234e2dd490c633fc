"""Signs that ranks compile different graphs: a DTensor's shards differ in size, or the program reads its rank.

Every rank comes to the same answer, whatever its own shard and its own rank are: sizes are read off global
shapes and placements, and that the rank was asked for counts, not what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from inductor_passes.torch_compat import dynamo, meshes


def is_rank_dependent() -> bool:
    """Return whether the program in work has asked for its rank, which its graph holds as a constant.

    ``x * rank`` is nothing to do on rank 1 and zeros on rank 0: what else can be left out differs too. Whoever
    traces says so with an attribute of torch's ``TracingContext``.
    """
    return getattr(dynamo.trace_in_work(), "dist_rank_dependent", False)


def has_uneven_values(gm: fx.GraphModule) -> bool:
    """Return whether any DTensor in a Dynamo graph, or in a graph inside it, has shards of different sizes."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                for value in leaves_of_value(node.meta.get("example_value")):
                    if is_uneven(value):
                        return True
    return False


def has_uneven_inputs() -> bool:
    """The same for the DTensor inputs of the graph that AOTAutograd has in work."""
    return any(shards_differ(shape, spec) for shape, spec in dynamo.sharded_inputs())


def is_uneven(value: object) -> bool:
    """Return whether ``value`` is a DTensor whose shards differ in size."""
    spec = meshes.spec_of(value)
    return spec is not None and shards_differ(spec.shape, spec)


def shards_differ(global_shape: Sequence[Any], spec: Any) -> bool:
    """Return whether a dimension of ``global_shape`` does not divide by the ranks that share it.

    ``spec`` has ``mesh`` and ``placements``. A symbolic size may divide or not: it counts as uneven.
    """
    ranks: Counter[int] = Counter()
    for mesh_dim, placement in enumerate(spec.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            dim %= len(global_shape)
            ranks[dim] = max(ranks[dim], 1) * spec.mesh.size(mesh_dim)
    return any(
        not isinstance(global_shape[dim], int) or global_shape[dim] % count
        for dim, count in ranks.items()
        if count > 1
    )


def leaves_of_value(value: object) -> Iterator[object]:
    """What lists and tuples hold, in order; anything else is one leaf."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of_value(item)
    else:
        yield value
