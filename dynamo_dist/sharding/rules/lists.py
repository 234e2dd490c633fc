"""Operators on lists of tensors, some of them DTensors, perhaps of several meshes.

A tensor-parallel plan leaves norms and biases plain, or puts experts on a mesh of their own, and an
optimizer puts all of them in one list. Torch refuses such a list. Here the operator runs once on
the entries without a DTensor, as plain tensors are used anywhere else, and once on those of each
mesh.

A handler costs a list twice: torch turns it into Python's for the handler, and back and again for
its own call. Where each entry's tensors have one spec and nothing is pending, an operator that
computes each element for itself says the same of the shards. What its results are called is learned
from torch's own answer, once for specs that are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.sharding.rules.reduction import is_extreme
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Patch

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Upstream = Callable[[], Any]

_MOST, _MOST_ALIKE = 256, 8
_NUMBERS = (int, float, bool, complex)
_SPEC, _LOCAL = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")


@dataclass(slots=True)
class _Answer:
    """``specs``: of the lists that it holds for. ``results``: of each entry's result; None if
    there is none.
    """

    specs: list[list[Any]]
    results: list[Any] | None
    holds: bool


_answers: dict[object, tuple[_Answer, ...]] = (
    dtensor_strategies.answers_for_lists
)  # emptied with torch's own caches


def run(
    op: dtensor_specs.OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    upstream: Upstream,
) -> object:
    """The results; ``upstream`` makes the call in any other way, and its answer is learned.

    The first argument of ``op`` is a list, and of each entry a result is computed by itself.
    """
    # A mode that watches DTensors has to see the call on them, not on local tensors.
    unwrapped = None if dtensor_specs.is_observed() else _unwrap(args, kwargs)
    if unwrapped is None:
        return upstream()
    local, specs = unwrapped
    type_keys = map(_type_key, (*args, *kwargs.values()))
    # The first spec stands for the list: comparing all of them is left to the few answers below the
    # key.
    key = (op, specs[0][0], len(specs[0]), *(args[1:] if "norm" in op.name() else type_keys))
    known = _answers.get(key, ())
    # Equal lists hold the same objects most of the time, which is what Python compares first.
    answer = next((each for each in known if each.specs == specs), None)
    if answer is None:
        results = upstream()
        if len(_answers) >= _MOST:
            _answers.clear()
        # Parameter groups may begin alike; of more than a few the oldest goes.
        _answers[key] = (_learned(op, specs, results), *known[: _MOST_ALIKE - 1])
        return results
    if not answer.holds:
        return upstream()
    # The newest lists, so that the next comparison finds the same objects.
    answer.specs = specs
    # Entries are shards or replicas, and the operator is element by element: no collective is due.
    found = op(*local, **kwargs)
    return found if answer.results is None else dtensor_specs.wrap_all(found, answer.results)


def _unwrap(
    args: Sequence[object], kwargs: dict[str, object]
) -> tuple[list[object], list[list[object]]] | None:
    """Local arguments and the specs of each list; None for what is not known to be computed by
    element.
    """
    local: list[object] = []
    specs: list[list[Any]] = []
    for value in args:
        if type(value) is list and value and not isinstance(value[0], _NUMBERS):
            try:
                specs.append(list(map(_SPEC, value)))
                local.append(list(map(_LOCAL, value)))
            except AttributeError:
                if not specs or not all(type(v) is torch.Tensor and not v.ndim for v in value):
                    return None
                local.append(value)  # a number for each, such as an optimizer's steps
        elif type(value) is DTensor:
            specs.append([value._spec])
            local.append(value._local_tensor)
        elif isinstance(value, torch.Tensor):
            return None
        else:
            local.append(value)
    if not specs or any(isinstance(value, (list, torch.Tensor)) for value in kwargs.values()):
        return None
    return local, specs


def _type_key(value: object) -> object:
    """Return the part of an argument that, besides its spec, decides the type of a result."""
    if isinstance(value, list):
        is_numbers = bool(value) and isinstance(value[0], _NUMBERS)
        # A float makes the result of whole numbers a float, so the type counts and the value does
        # not.
        return frozenset(map(type, value)) if is_numbers else list
    return type(value) if isinstance(value, (*_NUMBERS, torch.Tensor)) else value


def _learned(op: dtensor_specs.OpOverload, specs: list[list[Any]], results: Any) -> _Answer:
    first = specs[0]
    if not all(map(_is_own_or_replicated, first)) or not all(
        _goes_with(other, first) for other in specs[1:]
    ):
        return _Answer(specs, None, False)
    # An operator in place has no results to be wrapped.
    if results is None:
        return _Answer(specs, None, True)
    found = list(map(_SPEC, results))
    lies_alike = all(
        one.placements == other.placements and one.shape == other.shape
        for one, other in zip(found, first, strict=True)
    )
    return _Answer(specs, found, lies_alike or "norm" in op.name())


def _is_own_or_replicated(spec: DTensorSpec) -> bool:
    """Return whether each rank of the mesh, this one among them, has numbers of its own or whole
    ones.
    """
    return all(type(p) in (Shard, Replicate) for p in spec.placements) and dtensor_specs.is_here(
        spec.mesh
    )


def _goes_with(specs: list[Any], first: list[Any]) -> bool:
    """Return whether these lie as the entries do, or are a number for each, or one for all."""
    mesh = first[0].mesh
    is_number = all(
        not spec.shape and spec.mesh == mesh and all(type(p) is Replicate for p in spec.placements)
        for spec in specs
    )
    if is_number:
        return all(spec.mesh == mesh for spec in first)
    return len(specs) == len(first) and all(
        one.mesh == other.mesh and one.placements == other.placements and one.shape == other.shape
        for one, other in zip(specs, first, strict=True)
    )


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def handler(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """Run all entries at once where they have one layout; else plain ones and each mesh's apart."""
    return run(op, args, kwargs, lambda: _apart(op, args, kwargs))


def _apart(
    op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]
) -> object:
    """The results in the order of the lists; plain entries have plain results.

    A DTensor that is no list's entry, such as a factor for all, is gathered for the plain ones.
    Entries in which a DTensor meets a plain tensor of more than one element are torch's to refuse.
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
    # One mesh and no plain entry: torch does it by itself.
    if len(groups) == 1 and None not in groups:
        return dtensor_dispatch.as_upstream(op, handler, args, kwargs)
    found: dict[int, Any] = {}
    for mesh, kept in groups.items():
        some_args, some_kwargs = _only(kept, len(entries), (args, kwargs))
        if mesh is None:
            # Left in these arguments are DTensors outside of the lists, such as a factor.
            some_args, some_kwargs = dtensor_dispatch.tree_map_only(
                DTensor, _whole, (some_args, some_kwargs)
            )
            results = op(*some_args, **some_kwargs)
        else:
            results = dtensor_dispatch.as_upstream(op, handler, some_args, some_kwargs)
        found.update(zip(kept, results or (), strict=False))
    return [found[at] for at in sorted(found)] or None


def norms(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Orders that an empty shard has no norm of are computed one entry after the other."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    # The single norm has a strategy for empty shards, which the operator on lists lacks.
    if is_extreme(order):
        dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
        return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in args[0]]
    return handler(op, args, kwargs)


def clip(
    upstream: Callable[..., None],
    parameters: Any,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None,
) -> None:
    """Plain gradients are scaled by a plain norm: one after the other, each is a call of its
    own.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    # A look at each gradient costs more than one at the parameters; lists of both are the
    # handler's.
    if foreach is not False and set(map(type, given)) <= {DTensor}:
        return upstream(given, max_norm, total_norm, foreach)
    plain = [each for each in given if not isinstance(each.grad, DTensor)]
    if not plain or not isinstance(total_norm, DTensor):
        return upstream(given, max_norm, total_norm, foreach)
    upstream(
        [each for each in given if isinstance(each.grad, DTensor)], max_norm, total_norm, foreach
    )
    return upstream(plain, max_norm, _whole(total_norm), foreach)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _only(kept: Sequence[int], length: int, call: Arguments) -> Arguments:
    """The call with these entries alone of each list of this length."""

    def some(value: Any) -> object:
        return [value[at] for at in kept] if _is_list(value) and len(value) == length else value

    args, kwargs = call
    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _whole(tensor: DTensor) -> torch.Tensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)._local_tensor


def patches() -> list[Patch]:
    """List the patches that enabling makes for every operator on lists that computes each entry for
    itself.
    """
    undecided = [f"aten._fused_{name}_.{kind}" for name in ("sgd", "adagrad") for kind in _KINDS]
    ops = dict.fromkeys(dtensor_strategies.decided_operators())
    ops.update(dict.fromkeys(op for name in undecided for op in dtensor_dispatch.overloads(name)))
    entrywise = [
        patch
        for op in ops
        if op.name().startswith(("aten::_foreach_", "aten::_fused_"))
        and "List[Tensor]" in str(op._schema.arguments[0].type)
        and len(op._schema.returns) <= 1
        for patch in dtensor_strategies.on_dispatch(
            op, norms if "_foreach_norm" in op.name() else handler
        )
    ]
    return [*entrywise, *dtensor_dispatch.on_clipping(clip)]


_KINDS = ("default", "tensor_lr")
