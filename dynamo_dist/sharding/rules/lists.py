"""Operators on lists in which some entries are DTensors and others plain tensors, or DTensors of several meshes.

A tensor-parallel plan leaves norms and biases plain, or puts experts on a mesh of their own, and an
optimizer puts all of them in one list. Torch refuses such a list. Here the operator runs once on the
entries without a DTensor, as plain tensors are used anywhere else, and once on those of each mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.sharding.rules import local_lists
from dynamo_dist.sharding.rules.reduction import is_extreme
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Change

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def handler(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """At once where all entries lie alike; else with plain ones, and those of each mesh, apart."""
    return local_lists.run(op, args, kwargs, lambda: _apart(op, args, kwargs))


def _apart(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results in the order of the lists; plain entries have plain results.

    A DTensor that is no list's entry, such as a factor for all, is gathered for the plain ones. Entries
    in which a DTensor meets a plain tensor of more than one element are torch's to refuse.
    """
    given = (*args, *kwargs.values())
    entries = [
        [values[at] for values in given if _is_list(values) and len(values) == len(args[0])]
        for at in range(len(args[0]))
    ]
    groups: dict[DeviceMesh | None, list[int]] = {}
    for at, entry in enumerate(entries):
        mesh = next((each.device_mesh for each in entry if isinstance(each, DTensor)), None)
        groups.setdefault(mesh, []).append(at)
    if len(groups) == 1 and None not in groups:
        return dtensor_dispatch.as_stock(op, handler, args, kwargs)
    found: dict[int, Any] = {}
    for mesh, kept in groups.items():
        some_args, some_kwargs = _only(kept, len(entries), (args, kwargs))
        if mesh is None:
            some_args, some_kwargs = dtensor_dispatch.tree_map_only(
                DTensor, _whole, (some_args, some_kwargs)
            )
            results = op(*some_args, **some_kwargs)
        else:
            results = dtensor_dispatch.as_stock(op, handler, some_args, some_kwargs)
        found.update(zip(kept, results or (), strict=False))
    return [found[at] for at in sorted(found)] or None


def norms(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Orders that an empty shard has no norm of are computed one entry after the other."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if is_extreme(order):
        dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
        return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in args[0]]
    return handler(op, args, kwargs)


def clip(
    stock: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None,
) -> None:
    """Plain gradients are scaled by a plain norm: one after the other, each is a call of its own."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    # A look at each gradient costs more than one at the parameters; lists of both are the handler's.
    if foreach is not False and set(map(type, given)) <= {DTensor}:
        return stock(given, max_norm, total_norm, foreach)
    plain = [each for each in given if not isinstance(each.grad, DTensor)]
    if not plain or not isinstance(total_norm, DTensor):
        return stock(given, max_norm, total_norm, foreach)
    stock([each for each in given if isinstance(each.grad, DTensor)], max_norm, total_norm, foreach)
    return stock(plain, max_norm, _whole(total_norm), foreach)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _only(kept: Sequence[int], length: int, call: Arguments) -> Arguments:
    """The call with these entries alone of each list of this length."""

    def some(value: Any) -> Any:
        return [value[at] for at in kept] if _is_list(value) and len(value) == length else value

    args, kwargs = call
    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _whole(tensor: DTensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)._local_tensor


def changes() -> list[Change]:
    """List the changes that enabling makes for every operator on lists of which each entry is computed for itself."""
    undecided = [f"aten._fused_{name}_.{kind}" for name in ("sgd", "adagrad") for kind in _KINDS]
    ops = dict.fromkeys(dtensor_strategies.decided_operators())
    ops.update(dict.fromkeys(op for name in undecided for op in dtensor_dispatch.overloads(name)))
    entrywise = [
        change
        for op in ops
        if op.name().startswith(("aten::_foreach_", "aten::_fused_"))
        and "List[Tensor]" in str(op._schema.arguments[0].type)
        and len(op._schema.returns) <= 1
        for change in dtensor_strategies.on_dispatch(
            op, norms if "_foreach_norm" in op.name() else handler
        )
    ]
    return [*entrywise, *dtensor_dispatch.on_clipping(clip)]


_KINDS = ("default", "tensor_lr")
