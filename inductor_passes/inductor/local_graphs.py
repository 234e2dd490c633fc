"""Tell graphs that cannot communicate, or that differ between ranks, from all others.

Collectives come into a graph by an operator that launches, by a tensor whose operations launch
(DTensor, other subclasses), or by something that nobody can look into. A graph that has none of
these is plain; what is not known is not. So a plain graph can be left to torch, with the code and
the cache entries that torch has for it.

Every rank comes to the same answer, whatever its own shard and its own rank are: sizes are read off
global shapes and placements, and that the rank was asked for counts, not what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, BuiltinMethodType
from typing import Any

import torch
from torch import fx

from inductor_passes import registry
from inductor_passes.pass_options import PassOptions
from inductor_passes.torch_compat import c10d, dynamo, meshes, nodes


def is_rank_dependent() -> bool:
    """Return whether the program in work has read its rank, which its graph holds as a constant.

    ``x * rank`` does nothing on rank 1 and gives zeros on rank 0. What else can be left out then
    differs too. The code that traces says so with an attribute of torch's ``TracingContext``.
    """
    return getattr(dynamo.trace_in_work(), "dist_rank_dependent", False)


def has_uneven_values(gm: fx.GraphModule) -> bool:
    """Return whether any DTensor in a Dynamo graph, or in a graph inside it, has shards of
    different sizes.
    """
    return any(
        is_uneven(value)
        for graph in graphs_inside(gm)
        for node in graph.nodes
        for value in leaves_of_value(node.meta.get("example_value"))
    )


def has_uneven_inputs() -> bool:
    """The same for the DTensor inputs of the graph that AOTAutograd has in work."""
    return any(shards_differ(shape, spec) for shape, spec in dynamo.sharded_inputs())


def is_uneven(value: object) -> bool:
    """Return whether ``value`` is a DTensor whose shards differ in size."""
    spec = meshes.spec_of(value)
    return spec is not None and shards_differ(spec.shape, spec)


def shards_differ(global_shape: Sequence[Any], spec: Any) -> bool:
    """Return whether a dimension of ``global_shape`` does not divide by the ranks that share it.

    ``spec`` has ``mesh`` and ``placements``. A symbolic size may divide or not: it counts as
    uneven.
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


def graphs_inside(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """A module's graph, and those inside it."""
    return (each.graph for each in gm.modules() if isinstance(each, fx.GraphModule))


def leaves_of_value(value: object) -> Iterator[object]:
    """What lists and tuples hold, in order; anything else is one leaf."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves_of_value(item)
    else:
        yield value


# Operators of torch whose kernels, formulas and derivatives launch nothing.
_NAMESPACES = frozenset("aten inductor prims profiler quantized rngprims".split())
# Higher-order operators that run the graphs they are given, or a kernel; the graphs are looked
# into.
_HIGHER_ORDER = frozenset(
    "associative_scan autograd_function_apply cond flex_attention flex_attention_backward "
    "foreach_map hints_wrapper"
    " inline_asm_elementwise invoke_subgraph map map_impl out_dtype scan tag_activation_checkpoint"
    " triton_kernel_wrapper_functional triton_kernel_wrapper_mutation while_loop "
    "while_loop_stack_output wrap"
    " wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled".split()
)
_MODULES = (
    "_operator",
    "builtins",
    "math",
    "torch._C",
    "torch._VF",
    "torch._functorch",
    "torch._jit_internal",
    "torch._refs",
    "torch._tensor",
    "torch.amp",
    "torch.fft",
    "torch.functional",
    "torch.fx.experimental",
    "torch.linalg",
    "torch.nn.functional",
    "torch.random",
    "torch.special",
)
_NO_TENSORS = (
    *(int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def is_plain(
    gm: fx.GraphModule, inputs: Sequence[Any] = (), options: PassOptions = PassOptions()
) -> bool:
    """Return whether no pass can want anything of a graph as Dynamo traced it, or of those inside
    it.

    Without a process group every graph is plain. Where a registered pass works on graphs without
    collectives (``needs_collectives = False``), and ``options`` leave it on, none is.
    """
    passes = registry.ordered_passes()
    if any(not each.needs_collectives and each.enabled(options) for each in passes):
        return False
    if c10d.default_group() is None:
        return True
    return all(map(_is_plain_value, inputs)) and all(
        _is_plain_node(node, gm) for graph in graphs_inside(gm) for node in graph.nodes
    )


def _is_plain_node(node: fx.Node, gm: fx.GraphModule) -> bool:
    found = [node.meta[key] for key in ("example_value", "val") if key in node.meta]
    if not all(map(_is_plain_value, found)):
        return False
    if node.op == "call_module":
        owner = node.graph.owning_module or gm
        return isinstance(owner.get_submodule(str(node.target)), fx.GraphModule)
    return node.op != "call_function" or _is_plain_target(node.target)


def _is_plain_target(target: Any) -> bool:
    if (namespace := nodes.namespace(target)) is not None:
        return namespace in _NAMESPACES
    if (name := nodes.higher_order_name(target)) is not None:
        return name in _HIGHER_ORDER
    module = getattr(target, "__module__", None)
    if module is None:  # a method of a type of torch's, or one of its functions in C
        return isinstance(target, (BuiltinFunctionType, BuiltinMethodType)) or hasattr(
            target, "__objclass__"
        )
    if "distributed" in module:
        return False
    return module == "torch" or any(
        module == known or module.startswith(f"{known}.") for known in _MODULES
    )


def _is_plain_value(value: object) -> bool:
    return all(
        not nodes.wraps_tensors(each)
        if isinstance(each, torch.Tensor)
        else isinstance(each, _NO_TENSORS)
        for each in _leaves(value)
    )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, torch.Size):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
