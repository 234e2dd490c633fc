"""Placements: changes of them noted on nodes, and as words in plans."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor._ops._view_ops as _view_ops
import torch.distributed.tensor.placement_types as _placement_types
import torch.fx.proxy as fx_proxy
import torch.fx.traceback as fx_traceback
from torch._C import _get_dispatch_mode
from torch._C import _TorchDispatchModeKey as _ModeKey
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    _api,
    _dispatch,
    _redistribute,
)
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_dist.errors import PlanError
from dynamo_dist.program import MeshInfo, Spec, Value
from dynamo_dist.torch_compat.dtensor_specs import DTensorSpec, TensorMeta
from dynamo_dist.torch_compat.patching import Made, Patch, SetAttribute, Upstream, WrapFunction, has

if TYPE_CHECKING:
    from torch.distributed.tensor._op_schema import OpSchema

_opaque: dict[str, Placement] = {}


def word(placement: Placement) -> str:
    """``R``, ``S0``, ``P``, or the placement's own text."""
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Partial:
        return "P" if placement.reduce_op == "sum" else f"P{placement.reduce_op}"
    # Kept, because a placement of another class cannot be made again from its text.
    _opaque[f"?{placement}"] = placement
    return f"?{placement}"


def placement(text: str) -> Placement:
    """Inverse of ``word``, in this process. Raises PlanError for a word that no tensor here
    gave.
    """
    if text == "R":
        return Replicate()
    if text[0] == "S":
        return Shard(int(text[1:]))
    if text[0] == "P":
        return Partial(text[1:] or "sum")
    if text not in _opaque:
        raise PlanError(
            f"The plan names the placement {text!r}, which no tensor of this program has.",
            "The program, or the file, has changed since it was planned.",
            "Delete the plan file to plan anew.",
        )
    return _opaque[text]


def can_lie(tensor: DTensor, spec: Spec) -> bool:
    """Return whether there is a place for each mesh dimension, and a dimension for each place."""
    dims = [int(text[1:]) for text in spec if text[0] == "S"]
    return len(spec) == tensor.device_mesh.ndim and all(dim < tensor.ndim for dim in dims)


def words(placements: Sequence[Placement]) -> Spec:
    """A spec of the planner."""
    return tuple(word(p) for p in placements)


def planned_value(tensor: torch.Tensor | TensorMeta) -> Value:
    """Global shape and dtype of a DTensor or of what DTensor keeps as its metadata."""
    return Value(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.dtype.itemsize,
    )


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """Sizes, and the ranks of the first group of each dimension: the same on every rank."""
    # Not this rank's own group: plans must come out the same on every rank.
    ranks = mesh.mesh
    groups = tuple(
        tuple(int(r) for r in ranks.movedim(d, -1).reshape(-1, ranks.size(d))[0])
        for d in range(mesh.ndim)
    )
    world = torch.distributed.get_world_size()
    return MeshInfo(tuple(mesh.shape), groups, max(world, int(ranks.max()) + 1))


def is_spec(value: object) -> bool:
    """Return whether ``value`` stands for a DTensor in a schema."""
    return isinstance(value, DTensorSpec)


def redistribute_changes(describe: Callable[[object, object, str], str], field: str) -> list[Patch]:
    """Have every node that a DTensor's redistribution traces bear ``describe(from, to, op)`` as
    ``meta[field]``.

    A local tensor may carry a lazy conjugation or negation. It is resolved before it is sent:
    products, copies and views take such tensors as they are, and c10d then refuses them.

    ``from`` and ``to`` are DTensorSpecs; ``op`` is the operator that wants its input so, "" where
    the program redistributes. ``torch.fx.proxy._COPY_META_FIELDS`` names what is handed on from
    graph to graph; a field of our own keeps ``meta["custom"]`` free for a program's annotations.
    That list, ``redistribute_local_tensor``, ``OpDispatcher.redistribute_local_args`` and
    ``torch.fx.traceback.current_meta`` were seen in 2.13 to 2.15.
    """
    # torch's metadata of what is traced now, which nodes do not copy: only listed fields are.
    asking = f"{field} for"

    def redistribute_local_tensor(
        upstream: Upstream,
        local: torch.Tensor,
        current: object,
        target: object,
        **how: object,
    ) -> object:
        # Asked first: an exported program would name both, whether there is something to do or
        # not.
        if local.is_conj() or local.is_neg():
            local = local.resolve_conj().resolve_neg()
        if not fx_traceback.has_preserved_node_meta():
            return upstream(local, current, target, **how)
        op = fx_traceback.current_meta.get(asking, "")
        with _with_meta(field, describe(current, target, op)):
            return upstream(local, current, target, **how)

    def redistribute_local_args(
        upstream: Upstream, op_info: object, schema: OpSchema, *rest: object, **how: object
    ) -> object:
        if not fx_traceback.has_preserved_node_meta():
            return upstream(op_info, schema, *rest, **how)
        with _with_meta(asking, str(getattr(schema, "op", ""))):
            return upstream(op_info, schema, *rest, **how)

    name = "redistribute_local_tensor"
    return [
        # Each has the function by its own name; autograd's Redistribute calls the last one.
        *(
            WrapFunction(module, name, redistribute_local_tensor)
            for module in (_api, _dispatch, _redistribute)
        ),
        WrapFunction(_dispatch.OpDispatcher, "redistribute_local_args", redistribute_local_args),
        MetaField(field),
    ]


class MetaField(Made):
    """Have nodes hand on ``meta[field]`` to those that are traced from them."""

    def __init__(self, field: str) -> None:
        self._field = field

    def apply(self) -> None:
        fx_proxy._COPY_META_FIELDS.append(self._field)

    def undo(self) -> None:
        fx_proxy._COPY_META_FIELDS.remove(self._field)


@contextlib.contextmanager
def _with_meta(field: str, value: str) -> Iterator[None]:
    """Nodes made in this block bear ``value``."""
    meta = fx_traceback.current_meta
    before = meta.get(field)
    meta[field] = value
    try:
        yield
    finally:
        if before is None:
            del meta[field]
        else:
            meta[field] = before


KEPT_OFFSETS = 64
_partition_value: object = vars(Partial)["_partition_value"]


def cut_empty_shards() -> list[Patch]:
    """Have the shards of ranks for which nothing is left be cut off the tensor, as those of all
    ranks are.

    Upstream makes them of zeros. Inductor then knows on such a rank alone what a launch sends, runs
    it in the forward instead of the backward, or not at all where its result is cut, and the ranks
    hang. Seen in 2.13 to 2.15.
    """

    def fill(shards: list[torch.Tensor], dim: int, missing: int) -> list[torch.Tensor]:
        # A cut of a real shard depends on the input as those of other ranks do, so Inductor sees
        # one graph on all ranks.
        return [*shards, *[shards[0].narrow(dim, 0, 0).clone()] * missing]

    return [SetAttribute(_placement_types, "fill_empty_tensor_to_shards", fill)]


def keep_strided_shards() -> list[Patch]:
    """A DTensor that a view left in strided shards goes through AOTAutograd's flattening and back.

    Such a view says by a flag that the order of its shards stands beside its placements; the
    flattened form lacks the flag, and an order that is there shows it was set. Seen in torch 2.13
    to 2.15.
    """

    def unflatten(upstream: Upstream, inner: Any, context: Any, size: Any, stride: Any) -> object:
        placements, meta, *rest = context
        # Behind placements and metadata come the shard order and requires_grad.
        if len(rest) != 2 or rest[0] is None or not any(map(_is_strided_shard, placements)):
            return upstream(inner, context, size, stride)
        spec = DTensorSpec(
            inner["device_mesh"],
            placements,
            tensor_meta=TensorMeta(size, stride, meta.dtype),
            shard_order=rest[0],
            use_strided_shard_as_shard_order=False,
        )
        return DTensor(inner["_local_tensor"], spec, requires_grad=rest[1])

    return [WrapFunction(DTensor, "__tensor_unflatten__", unflatten)]


def _is_strided_shard(placement: Placement) -> bool:
    return isinstance(placement, _placement_types._StridedShard)


def count_strided_shards_with_real_tensors() -> list[Patch]:
    """Compute the size of a strided shard with real tensors while tracing, not with fakes.

    Otherwise each index becomes an unknown size of the program's graph. Seen in torch 2.13 to 2.15.
    """
    cls, name = _placement_types._StridedShard, "local_shard_size_and_offset"
    if not has(cls, name, off="strided shards may not trace"):
        return []
    upstream: Any = vars(cls)[name]

    @functools.wraps(upstream)
    def size_and_offset(*args: Any, **kwargs: Any) -> object:
        # Outside of a fake mode torch computes with real tensors anyway.
        fake = _get_dispatch_mode(_ModeKey.FAKE) is not None
        args, kwargs = _pytree.tree_map_only(torch.SymInt, _known_size, (args, kwargs))
        # Of a size that is still a symbol there is no list of indices to count.
        if not fake or any(isinstance(arg, torch.SymInt) for arg in (*args, *kwargs.values())):
            return upstream(*args, **kwargs)
        return counted(*args, **kwargs)

    @functools.lru_cache(maxsize=KEPT_OFFSETS)  # a list as long as the dimension
    def counted(*args: Any, **kwargs: Any) -> object:
        with _disable_current_modes():
            return upstream(*args, **kwargs)

    return [SetAttribute(cls, name, size_and_offset)]


def _known_size(size: torch.SymInt) -> int | torch.SymInt:
    """The number, where guards have fixed a symbolic size."""
    known = size.node.maybe_as_int()
    return size if known is None else known


def fix_split_factors() -> list[Patch]:
    """Lay out a view that joins dimensions as in eager mode, with dynamic sizes too.

    Where a dimension after the first is sharded, the product of those before it is how often its
    shards lie in the joined one, and must be a number: these sizes are fixed, by guards. Upstream
    refuses the view; on meshes of several dimensions the tensor is gathered as before.
    """
    cls = _view_ops._ViewShardingPropagator

    def rewrite(
        upstream: Upstream,
        self: Any,
        p: Any,
        mesh_dim: int,
        placements: object,
        claimed: object,
        sizes: Any,
        *args: object,
    ) -> object:
        sizes = list(sizes)
        # On such meshes a dimension may be sharded twice, and the factor would be of both.
        several = len(self.mesh_sizes) > 1
        for joined in () if several else self.rule:
            if isinstance(joined, _view_ops.Flatten):
                dims = [getattr(dim, "input_dim", None) for dim in joined.input_dims]
                for dim in dims[: dims.index(p.dim)] if p.dim in dims else ():
                    if not has_free_unbacked_symbols(sizes[dim]):
                        sizes[dim] = int(sizes[dim])
        return upstream(self, p, mesh_dim, placements, claimed, sizes, *args)

    return [WrapFunction(cls, "_rewrite_plain_shard", rewrite)]
