"""``data_parallel``: parameters as sharded DTensors, gathered in the graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from dynamo_dist.errors import DataParallelError
from dynamo_dist.parallel.gather import Gather
from dynamo_dist.parallel.modules import is_managed, manage
from dynamo_dist.parallel.shard import Layout, shard
from dynamo_dist.torch_compat import wrappers

Mode = Literal["fully_shard", "hybrid", "replicate"]

_PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "fully_shard": (Shard(0),),
    "hybrid": (Replicate(), Shard(0)),
    "replicate": (Replicate(),),
}


def data_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    mode: Mode = "fully_shard",
    *,
    dim_names: tuple[str, ...] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Train ``module`` on a share of the batch per rank; in place, and returned.

    Every parameter becomes a DTensor on ``mesh``. Forward reads it whole, and its gradient is the
    mean over the ranks; both collectives are ordinary operations of the traced graph, so that
    ``torch.compile`` can schedule them (torch's ``fully_shard`` and DDP issue them from hooks).
    A parameter that modules share (tied embeddings) stays one.
    Names, ``state_dict``, optimizers and ``clip_grad_norm_`` work as on any module of DTensors;
    each backward reduces, so gradients accumulate as usual.

    Args:
        module: parameters equal on all ranks, on any device, ``meta`` included. Parameters that
            are DTensors on another mesh of the same root (tensor parallel) are split further.
            Submodules that were given to ``data_parallel`` before keep what they have.
        mesh: one dimension, or for ``mode="hybrid"`` two: replicas, then shards.
        mode: ``"fully_shard"``: a share of dimension 0 of each parameter per rank;
            ``"hybrid"``: the same within each replica; ``"replicate"``: a whole copy per rank.
        dim_names: the dimensions of ``mesh`` to use, outer first; all by default.
        param_dtype: what parameters, and floating-point inputs of ``module``, are cast to before
            they are gathered; the sharded parameters and their gradients keep their own dtype.
        reduce_dtype: what gradients are summed in; that of the gradient by default.
        reshard_after_forward: compiled code gathers again in backward, which saves the memory of
            the whole parameters in between.

    Raises:
        DataParallelError: a mesh of the wrong number of dimensions or without a named one; a
            module that is data parallel already, by ours or by torch's wrappers; a parameter that
            is shared with a module sharded in another way; a DTensor on this mesh already.
    """
    layout = Layout(
        _dimensions(mesh, mode, dim_names),
        _PLACEMENTS[mode],
        param_dtype,
        reduce_dtype,
        reshard_after_forward,
    )
    _refuse_wrapped(module)
    made: dict[nn.Parameter, _Share] = {}
    plan = {
        owner: {key: _share(name, param, layout, made) for key, name, param in params}
        for owner, params in _owners(module)
        if params or owner is module
    }
    # Nothing has changed up to here: an error leaves the module as it was.
    _shares.update(made)
    for owner, params in plan.items():
        for key, share in params.items():
            owner.register_parameter(key, share.param)
        gathers = {key: share.gather for key, share in params.items()}
        manage(owner, gathers, param_dtype if owner is module else None)
    return module


def _dimensions(mesh: DeviceMesh, mode: str, names: tuple[str, ...] | None) -> DeviceMesh:
    if mode not in _PLACEMENTS:
        raise DataParallelError(
            f"mode={mode!r} is unknown.", fix=f"Known are {', '.join(map(repr, _PLACEMENTS))}."
        )
    if names is not None:
        known = mesh.mesh_dim_names or ()
        if missing := [name for name in names if name not in known]:
            raise DataParallelError(
                f"the mesh has no dimension {missing[0]!r}.",
                f"Its dimensions are {', '.join(map(repr, known)) or 'not named'}.",
                "Name them in init_device_mesh(..., mesh_dim_names=(...)).",
            )
        mesh = mesh[names]
    if mesh.ndim != len(_PLACEMENTS[mode]):
        raise DataParallelError(
            f"mode={mode!r} takes a mesh of {len(_PLACEMENTS[mode])} dimensions, "
            f"this one has {mesh.ndim}: {mesh}.",
            fix='Choose with dim_names=, for example dim_names=("dp",), or pass mesh["dp"].',
        )
    return mesh


def _refuse_wrapped(module: nn.Module) -> None:
    if is_managed(module):
        raise DataParallelError(
            "the module is data parallel already.",
            fix="Call data_parallel once for each module; submodules may come before.",
        )
    for name, each in module.named_modules():
        if isinstance(each, wrappers.OTHER_WRAPPERS):
            raise DataParallelError(
                f"{name or 'the module'} is wrapped by {type(each).__name__} already.",
                "Its hooks issue collectives of their own.",
                "Use either that wrapper or data_parallel.",
            )


def refuse_managed(modules: Iterable[nn.Module], ignored: Container[nn.Parameter]) -> None:
    """Raise DataParallelError where torch's FSDP2 or ``replicate`` is about to take a module that is data parallel.

    ``ignored``: parameters that it leaves alone.
    """
    for module in modules:
        if is_managed(module) and any(p not in ignored for p in module.parameters(recurse=False)):
            raise DataParallelError(
                f"{type(module).__mro__[1].__name__} is data parallel already, by data_parallel().",
                "Its parameters are gathered and reduced once; a second time would shard the shards.",
                "Use either data_parallel or torch's fully_shard or replicate, or name its parameters in ignored_params=.",
            )


class _Share(NamedTuple):
    """A parameter as data parallel ranks hold it."""

    param: nn.Parameter
    gather: Gather
    layout: Layout


# By the whole parameter each was made of, which other modules may still hold.
_shares = WeakIdKeyDictionary()


def _share(
    name: str, param: nn.Parameter, layout: Layout, made: dict[nn.Parameter, _Share]
) -> _Share:
    known: _Share | None = made.get(param) or _shares.get(param)
    if known is not None and known.layout != layout:
        raise DataParallelError(
            f"parameter {name!r} is shared with a module that is data parallel in another way.",
            "Each would become a shard of its own, and they would drift apart.",
            "Give both modules to one call, or untie them before: "
            "owner.weight = nn.Parameter(owner.weight.detach().clone()).",
        )
    if known is None:
        known = made[param] = _Share(*shard(name, param, layout), layout)
    return known


def _owners(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[nn.Module, list[tuple[str, str, nn.Parameter]]]]:
    """Each module that is not data parallel yet, with the keys, full names and values it owns."""
    yield (
        module,
        [
            (key, prefix + key, param)
            for key, param in module._parameters.items()
            if param is not None
        ],
    )
    for name, child in module.named_children():
        if not is_managed(child):
            yield from _owners(child, f"{prefix}{name}.")
