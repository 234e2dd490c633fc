"""One parameter's way from its shard to what compute reads, and its gradient's way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_map_only

from dynamo_dist.torch_compat import aot_partition

_ops = torch.ops._c10d_functional
WHOLE, PARTIAL, HOOKS = "whole", "partial", "hooks"


class Keeper(Protocol):
    """Keeps gradients of parameters between backwards."""

    def take(self, path: tuple[int, int], what: str) -> torch.Tensor | None:
        """Take what was kept of one parameter's gradient, WHOLE or PARTIAL."""

    def call_hooks(self, path: tuple[int, int], grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient as hooks on the gathered parameter leave it."""


# A gather's ``key`` is one of these and, behind slashes, its parameter's path.
KEEPERS: WeakValueDictionary[str, Keeper] = WeakValueDictionary()


@dataclass(frozen=True)
class Ranks:
    """A group by its c10d name (guarded as a constant, and the same on all its ranks) and its
    size.
    """

    name: str
    size: int


@dataclass(frozen=True)
class TensorParallel:
    """The parameter as it was before FSDP2: a DTensor of these global sizes and placements on
    ``mesh``.
    """

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Gather:
    """Describes how forward reads one parameter.

    ``rows`` is the size of dimension ``dim`` of the unsharded (local to tensor parallel ranks)
    parameter, ``shard`` the group that holds a chunk of them each (None: every rank has all),
    ``replicate`` the group whose members hold equal copies (None: no such group). Dimensions other
    than 0 are split evenly. ``divide``: what the sum of gradients is divided by; None for the
    number of ranks.
    ``keeps``: the gradient is not reduced further than so, and goes to the leaf that the parameter
        is gathered with: WHOLE before any reduction, PARTIAL after the reduce-scatter. ``takes``
        (both words, or one): what was kept so before is added to it where it was left, as ``key``
        finds it; HOOKS among them: hooks on the gathered parameter see the gradient first.
    ``group`` names those that FSDP2 gathers together.
    """

    rows: int
    shard: Ranks | None
    replicate: Ranks | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    tensor_parallel: TensorParallel | None
    dim: int = 0
    divide: float | None = None
    keeps: str = ""
    takes: str = ""
    key: str = ""
    group: str = ""

    def __call__(self, param: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """The whole parameter, in ``param_dtype``; a DTensor if it was one before FSDP2. Called
        while tracing.

        The gathered copy is not kept for backward if ``reshard_after_forward``: the partitioner
        gathers again instead.
        """
        local = param.to_local() if isinstance(param, DTensor) else param
        whole: torch.Tensor = torch.ops.dynamo_dist_parallel.gather(local, kept, *self.settings())
        was = self.tensor_parallel
        if was is None or local is param:  # where a program wants local tensors, it has put one
            return whole
        return DTensor.from_local(
            whole, was.mesh, was.placements, run_check=False, shape=was.shape, stride=was.stride
        )

    def settings(self) -> tuple[object, ...]:
        """Return the operator's arguments that follow the tensors."""
        shard, replicate = self.shard, self.replicate
        return (
            self.rows,
            None if shard is None else shard.name,
            1 if shard is None else shard.size,
            None if replicate is None else replicate.name,
            1 if replicate is None else replicate.size,
            self.param_dtype,
            self.reduce_dtype,
            self.reshard_after_forward,
            self.dim,
            self.divide,
            self.keeps,
            self.takes,
            self.key,
            self.group,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """``local`` (a chunk of ``dim``, as ``torch.chunk`` makes them) -> all of it."""
        if self.param_dtype is not None:
            local = local.to(self.param_dtype)
        if self.shard is None:
            # A tensor of its own: autograd treats an input that a function returns as it is
            # differently.
            return local.view_as(local)
        # Ragged chunks of dimension 0 are padded to the first one's rows, since an all-gather sends
        # equal sizes.
        padded = local.contiguous() if self.dim else _pad_rows(local, self._chunk).contiguous()
        gathered = _ops.all_gather_into_tensor(padded, self.shard.size, self.shard.name)
        whole: torch.Tensor = _ops.wait_tensor(gathered)
        if self.dim:
            # Gathered along dimension 0, one rank's shard after the other; put together where they
            # were split.
            return torch.cat(whole.chunk(self.shard.size), dim=self.dim)
        # The padding of ragged chunks lies at the end.
        return whole if whole.shape[0] == self.rows else whole[: self.rows]

    def kept_like(self, param: torch.Size, dtype: torch.dtype) -> tuple[list[int], torch.dtype]:
        """Size and dtype of what is kept of the gradient of a whole parameter of this size,
        whose shards are in ``dtype``.
        """
        size = list(param)
        if self.keeps == PARTIAL and self.shard is not None:
            # The padded chunk, which is what the reduce-scatter gives on every rank.
            size[self.dim] = -(-size[self.dim] // self.shard.size)
        return size, self.reduce_dtype or self.param_dtype or dtype

    def reduced(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the whole -> this rank's rows of its mean over all ranks, padded; or what
        is kept.

        Sums run in ``reduce_dtype``, over the shard group first, because the rest is smaller then.
        Divisions are where FSDP2 has them.
        """
        if HOOKS in self.takes:
            grad = _hooked(grad, self.key)
        if self.reduce_dtype is not None:
            grad = grad.to(self.reduce_dtype)
        # Before any division: FSDP2 divides the sum of micro-batches once, when it reduces.
        if WHOLE in self.takes:
            grad = _with_kept(grad, self.key, WHOLE)
        if self.keeps == WHOLE:
            return grad
        before, behind_shard, behind_all = self._divisors(grad.dtype)
        grad = _divided(grad, before)
        if self.shard is not None:
            if self.dim:
                # A reduce-scatter splits dimension 0, so the chunks of another dimension are lined
                # up there.
                padded = torch.cat(grad.chunk(self.shard.size, dim=self.dim))
            else:
                padded = _pad_rows(grad, self._chunk * self.shard.size).contiguous()
            scattered = _ops.reduce_scatter_tensor(padded, "sum", self.shard.size, self.shard.name)
            grad = _divided(_ops.wait_tensor(scattered), behind_shard)
        # Behind the sum over shards, where FSDP2 left what it keeps between backwards.
        if PARTIAL in self.takes:
            grad = _with_kept(grad, self.key, PARTIAL)
        if self.keeps == PARTIAL:
            return grad
        # HSDP: the chunk is averaged over the ranks that hold equal copies.
        if self.replicate is not None:
            grad = _ops.wait_tensor(_ops.all_reduce(grad.contiguous(), "sum", self.replicate.name))
        return _divided(grad, behind_all)

    def mean(self, grad: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the whole -> this rank's ``rows`` of its mean over all ranks, in
        ``dtype``.
        """
        grad = self.reduced(grad)
        if self.shard is not None and not self.dim and grad.shape[0] != rows:
            grad = grad[:rows]
        return grad.to(dtype)

    def _divisors(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """Return the gradients' divisors: before any sum, after the one over shards, and last.

        A dtype of little range is divided in two steps, around the sums.
        """
        shards = self.shard.size if self.shard else 1
        copies = self.replicate.size if self.replicate else 1
        # float16 overflows in a sum over many ranks: half of the division goes before it, as in
        # FSDP2.
        if dtype not in (torch.float32, torch.bfloat16):
            divide = shards * copies if self.divide is None else self.divide
            before = _about_root(divide)
            return before, 1, divide / before
        if self.divide is None:
            return 1, shards, copies
        # A factor of the program's own divides once, after the first sum there is.
        return (1, self.divide, 1) if self.shard is not None else (1, 1, self.divide)

    @property
    def _chunk(self) -> int:
        assert self.shard is not None
        return -(-self.rows // self.shard.size)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, kept: torch.Tensor | None, gather: Gather
    ) -> torch.Tensor:
        ctx.gather, ctx.dtype = gather, local.dtype
        ctx.rows = local.shape[0] if local.ndim else 0
        return gather.whole(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Marked for the bucketing pass; a reduction is never computed a second time.
        with aot_partition.gathered(ctx.gather.group, again=False):
            if ctx.gather.keeps:
                return None, ctx.gather.reduced(grad), None
            return ctx.gather.mean(grad, ctx.rows, ctx.dtype), None, None


def _with_kept(grad: torch.Tensor, key: str, what: str) -> torch.Tensor:
    # In place, of a copy that Inductor leaves out where it can: mostly there is nothing to add.
    grad = grad.clone(memory_format=torch.contiguous_format)
    torch.ops.dynamo_dist_parallel.add_kept_(grad, key, what)
    return grad


def _hooked(grad: torch.Tensor, key: str) -> torch.Tensor:
    grad = grad.clone(memory_format=torch.contiguous_format)
    torch.ops.dynamo_dist_parallel.call_hooks_(grad, key)
    return grad


def _divided(tensor: torch.Tensor, by: float) -> torch.Tensor:
    return tensor if by == 1 else tensor / by


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing]) if missing else tensor


def _about_root(divide: float) -> int:
    """Return the power of two that splits a division in two of about the same size."""
    before = 1
    while divide % before == 0 and divide / before > before:
        before *= 2
    return before


def cast_floating(dtype: torch.dtype, values: object) -> Any:
    """A tree of values with its floating-point tensors in another dtype."""
    return tree_map_only(
        torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values
    )


# In a function that Dynamo traces a gather is one operator: a model has hundreds, and tracing into
# each is slow. AOTAutograd sees what the operator does.
_library = torch.library.Library("dynamo_dist_parallel", "DEF")
_library.define(
    "gather(Tensor local, Tensor? kept, SymInt rows, str? shard, int shard_size, str? replicate, "
    "int replicate_size,"
    " ScalarType? param_dtype, ScalarType? reduce_dtype, bool reshard_after_forward, int dim, "
    "float? divide,"
    " str keeps, str takes, str key, str group) -> Tensor"
)
_library.define(
    "add_kept_(Tensor(a!) grad, str key, str what) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)
_library.define("call_hooks_(Tensor(a!) grad, str key) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


def _gather(
    local: torch.Tensor,
    kept: torch.Tensor | None,
    rows: int,
    shard: str | None,
    shard_size: int,
    replicate: str | None,
    replicate_size: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    dim: int,
    divide: float | None,
    keeps: str,
    takes: str,
    key: str,
    group: str,
) -> torch.Tensor:
    gather = Gather(
        rows,
        None if shard is None else Ranks(shard, shard_size),
        None if replicate is None else Ranks(replicate, replicate_size),
        param_dtype,
        reduce_dtype,
        reshard_after_forward,
        None,
        dim,
        divide,
        keeps,
        takes,
        key,
        group,
    )
    # Without a shard group there is no gather to do again, and recomputing a cast saves nothing.
    again = gather.shard is not None and reshard_after_forward
    with aot_partition.gathered(group, again=again):
        whole: torch.Tensor = _Whole.apply(local, kept, gather)
    return whole


_library.impl("gather", _gather, "CompositeImplicitAutograd")


def _kept_under(key: str) -> tuple[Keeper, tuple[int, int]]:
    name, group, place = key.rsplit("/", 2)
    return KEEPERS[name], (int(group), int(place))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add_kept(grad: torch.Tensor, key: str, what: str) -> None:
    keeper, path = _kept_under(key)
    # Looked up when the backward runs: whether anything is kept is known only then.
    kept = keeper.take(path, what)
    if kept is not None:
        grad += kept.reshape(grad.shape)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_hooks(grad: torch.Tensor, key: str) -> None:
    keeper, path = _kept_under(key)
    grad.copy_(keeper.call_hooks(path, grad.clone()))  # hooks may keep what they are given


_library.impl("add_kept_", _add_kept, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dynamo_dist_parallel::add_kept_", lambda grad, key, what: None, lib=_library
)
_library.impl("call_hooks_", _call_hooks, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dynamo_dist_parallel::call_hooks_", lambda grad, key: None, lib=_library
)
