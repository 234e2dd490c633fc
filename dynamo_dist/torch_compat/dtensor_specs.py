"""Layouts of DTensors: specs, types, and memory that two tensors may share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.tensor._utils as _utils
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, _resolve_process_group
from torch._guards import detect_fake_mode
from torch._ops import OpOverload as OpOverload
from torch.distributed import get_process_group_ranks
from torch.distributed._local_tensor import LocalTensor as LocalTensor
from torch.distributed._local_tensor import LocalTensorMode as LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._op_schema import OpSchema as OpSchema
from torch.distributed.tensor._op_schema import OpSpec as OpSpec
from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo as RuntimeSchemaInfo
from torch.distributed.tensor._op_schema import TupleStrategy as TupleStrategy
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing

from dynamo_dist.torch_compat.dtensor_dispatch import Handler, dispatcher
from dynamo_dist.torch_compat.patching import Patch, SetItem, WrapAttribute, has

# context_parallel is experimental in torch: its module moves from version to version.
try:
    from torch.distributed.tensor.experimental._context_parallel import (
        _attention as _context_parallel,
    )
except ImportError:
    _context_parallel = None  # type: ignore[assignment]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two stand-ins share memory; True where symbolic sizes or strides leave it
    open.
    """
    try:
        if not _same_storage(a, b):
            return False
    except NotImplementedError:  # no storage: a subclass's wrapper
        return a is b
    # Offsets and strides count elements, which are of two lengths here: ranges cannot be compared.
    if a.dtype != b.dtype and a.element_size() != b.element_size():
        return True
    # Both err to the safe side: whatever is unknown counts as an overlap.
    return _ranges_meet(_extent(a), _extent(b)) and not _apart_in_a_dimension(a, b)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last element within the storage; None if not known while tracing."""
    if not all(
        isinstance(n, int) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    ):
        return None
    # An empty range, which meets none.
    if tensor.numel() == 0:
        return (0, -1)
    first: Any = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, last


def _ranges_meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    if a is None or b is None:
        return True
    return a[0] <= a[1] and b[0] <= b[1] and a[0] <= b[1] and b[0] <= a[1]


def _apart_in_a_dimension(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether equal strides show two slices of one tensor to be disjoint, such as column
    blocks.
    """
    if a.stride() != b.stride() or _extent(a) is None or _extent(b) is None:
        return False
    at, bt = a.storage_offset(), b.storage_offset()
    # From the longest stride on, as a row-major layout is read; each step leaves the offset within
    # one slice.
    for step, n, m in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if step <= 0:
            return False
        start, other = at // step, bt // step
        # The slices share no index of this dimension, so no element either.
        if start + n <= other or other + m <= start:
            return True
        at, bt = at % step, bt % step
    return False


def redistribute_costs(source: OpStrategy, target: DTensorSpec) -> list[float]:
    """Return the costs of bringing an input from where it is to ``target``."""
    return generate_redistribute_costs(source, target)


def spec(mesh: DeviceMesh, placements: Sequence[Placement], meta: Any = None) -> DTensorSpec:
    """A layout; ``meta`` is the global TensorMeta or None."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def mask_partial(shape: Sequence[int], dim: int) -> _MaskPartial:
    """Pending as a sum in which each rank has zeros for indices that fall outside its part of
    ``dim``.
    """
    # Hashed with the placement: symbolic sizes cannot be.
    return _MaskPartial(offset_shape=torch.Size(int(size) for size in shape), offset_dim=dim)


def is_masked(placement: Placement) -> bool:
    """Return whether it is a placement of ``mask_partial``."""
    return isinstance(placement, _MaskPartial)


def sharded_dim(placement: Placement | None) -> int | None:
    """Return the tensor dimension that a placement shards, contiguously or strided; else None."""
    # Asked by attribute: torch's strided shards have one and are no subclass of Shard.
    dim: int | None = getattr(placement, "dim", None)
    return dim


def split_factor(placement: Placement | None) -> int | None:
    """Return how often a strided shard lies in its dimension; None for any other placement."""
    factor: int | None = getattr(placement, "split_factor", None)
    return factor


def is_norm(placement: Placement) -> bool:
    """Return whether parts of a norm are pending there."""
    return isinstance(placement, _NormPartial)


def own_part_of_index(
    index: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[int], dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index into ``dim`` of a whole as one into this rank's part, and where it falls outside
    of that.
    """
    # Torch's own arithmetic of which indices are on this rank, ragged shards included.
    mask = mask_partial([1] * dim + [shape[dim]], dim)
    own = mask._partition_value(index, mesh, mesh_dim)
    # The mask is taken out at once: a second placement of the same kind would refuse to be combined
    # with it.
    outside = mask.mask_buffer.data
    assert outside is not None
    return own, outside


def own_length(size: int, mesh: DeviceMesh, mesh_dim: int) -> int:
    """How much of a dimension of ``size`` this rank has when it is cut over one mesh dimension."""
    length, _ = Shard.local_shard_size_and_offset(
        size, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    )
    return length


def own_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """The sizes of this rank's part of a tensor of this global shape, as torch cuts it. Seen in
    2.13 to 2.15.
    """
    return tuple(_utils.compute_local_shape_and_global_offset(tuple(shape), mesh, placements)[0])


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], meta: Any) -> Any:
    """A DTensor below autograd, from its local tensor and the global shape, strides and dtype."""
    return DTensor(local, spec(mesh, placements, meta), requires_grad=local.requires_grad)


def wrap_all(local: Sequence[torch.Tensor], specs: Sequence[DTensorSpec]) -> object:
    """Wrap an operator's local results as torch does."""
    return dispatcher().wrap(local, specs)


def is_here(mesh: DeviceMesh) -> bool:
    """Return whether this rank is one of the mesh's."""
    return mesh.get_coordinate() is not None


def is_observed() -> bool:
    """Return whether somebody traces, or looks at what is dispatched."""
    return torch._C._len_torch_dispatch_stack() > 0


def relayout(
    local: torch.Tensor, mesh: DeviceMesh, source: Sequence[Placement], target: DTensorSpec
) -> torch.Tensor:
    """The local tensor of a whole in other placements; to a pending sum too."""
    return redistribute_local_tensor(local, spec(mesh, source, target.tensor_meta), target)


def adopt(op: OpOverload, args: object, kwargs: object, target: DTensor, found: DTensor) -> object:
    """Make ``target`` what ``found`` is, shape included, for an operator that changes it in
    place.
    """
    # The wrapper stays the same object, as an in-place operator has to return its argument.
    target._local_tensor, target._spec = found._local_tensor, found._spec
    return return_and_correct_aliasing(op, args, kwargs, target)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two local tensors are in the same memory, under functionalization too."""
    if isinstance(one, LocalTensor) and isinstance(other, LocalTensor):
        # LocalTensor simulates several ranks in one process. All of them alias alike, so one
        # answers for all.
        rank = min(one._ranks)
        one, other = one._local_tensors[rank], other._local_tensors[rank]
    return _same_storage(one, other)


def random_states() -> list[torch.Tensor]:
    """The states of the generators that operators draw from by default; nothing while a program
    is traced.
    """
    # A generator's state is data, and reading it would put an operator into the graph.
    if detect_fake_mode() is not None or get_proxy_mode() is not None:
        return []
    with _disable_current_modes():
        found = [torch.default_generator.get_state()]
        # Reading the state synchronises, which is an error while a CUDA graph is captured.
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            found.append(torch.cuda.get_rng_state())
    return found


def are_same_states(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing was drawn in between."""
    with _disable_current_modes():
        return all(map(torch.equal, before, after))


def group_and_reduction(
    op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[int, ...] | None, str | None]:
    """Return the ranks of a c10d collective's group, and the name of its reduction.

    The ranks are None for an unknown group, such as a name while another program is traced. The
    name is None where there is no reduction. c10d hands out groups and reductions as script
    objects.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group: Any = given.get("process_group", given.get("group_name"))
    # c10d's own operators get the group boxed; functional collectives get its name.
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    elif isinstance(group, str):
        resolve: Callable[[Any], Any] = _resolve_process_group
        group = resolve(group)
    ranks = tuple(get_process_group_ranks(group)) if isinstance(group, ProcessGroup) else None
    reduction: Any = given.get("reduce_op")
    # A boxed ReduceOp does not compare with Python's; its number does.
    if not isinstance(reduction, str) and reduction is not None:
        reduction = ReduceOp.RedOpType(int(reduction.op())).name.lower()
    return ranks, reduction


@functools.lru_cache(maxsize=256)
def is_beside(mesh: DeviceMesh, ranks: tuple[int, ...]) -> bool:
    """Return whether all ``ranks`` stand at one place of ``mesh``, each in a mesh of its own of
    one root.
    """
    with _disable_current_modes():
        # Ranks are compared in the root mesh: a submesh does not know where ranks outside of it
        # stand.
        root, mine = mesh._get_root_mesh().mesh, mesh.mesh
        places = dict(zip(root.flatten().tolist(), _indices(root), strict=True))
        spanned = [places.get(rank) for rank in mine.flatten().tolist()]
    found = [places.get(rank) for rank in ranks]
    if None in spanned or None in found:
        return False
    # Dimensions of the root mesh that the tensor's own mesh spans; the group must not move along
    # any of them.
    across = [dim for dim, at in enumerate(zip(*spanned, strict=True)) if len(set(at)) > 1]
    return all(len({at[dim] for at in found if at is not None}) == 1 for dim in across)


def _indices(tensor: torch.Tensor) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, tensor.shape))


def in_context_parallel(
    handlers: dict[OpOverload, Handler],
    output: Callable[[Callable[..., object]], Callable[..., object]],
) -> list[Patch]:
    """Have ``handlers`` answer calls inside ``context_parallel``.

    ``output`` wraps the function that takes its results apart. Inside ``context_parallel``, torch's
    dispatcher has a table of handlers made of two others; this patch changes the one for attention.
    A torch without these names has no context parallelism that we know of; seen in 2.13 to 2.15.
    """
    names = "custom_ops", "_ContextParallel"
    if not has(_context_parallel, *names, off="context_parallel on the CPU is torch's"):
        return []
    table, style = _context_parallel.custom_ops, _context_parallel._ContextParallel
    return [
        *(SetItem(table, op, handler) for op, handler in handlers.items()),
        WrapAttribute(style, "sdpa_output_fn", output, traced=True),
    ]
