"""Run one step of a model, and compare two results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.numerics.ranks import LayoutError, resolved, whole_tensor
from dynamo_dist.torch_compat import dtensor_ranks, dtensor_specs

# Sums in another order: a few units in the last place for each of the numbers added up.
TOLERANCES_OF_SUMS = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.complex32: 2e-2,
    torch.bfloat16: 1e-1,
}
# One step of rounding: a sum in another order may round to the next value.
_STEP_OF_FLOAT8 = {
    torch.float8_e4m3fn: 0.125,
    torch.float8_e4m3fnuz: 0.125,
    torch.float8_e5m2: 0.25,
    torch.float8_e5m2fnuz: 0.25,
}


def difference_from_one_device(
    found: Any,
    expected: object,
    values: bool = True,
    tolerance: float | None = None,
    same_replicas: bool = True,
) -> str:
    """Tell what differs between a result on all ranks and that of one device; empty if nothing
    does.

    ``found`` is a DTensor, or what each rank computed by itself, on which the ranks must agree.
    Without ``values``, shapes and dtypes alone count. ``tolerance`` is relative to the largest
    value; by default it is that of the dtype. Replicas are the same to the last bit, unless
    ``same_replicas`` is False.
    """
    if not isinstance(expected, torch.Tensor):
        if isinstance(found, torch.Tensor) or not values or _equal(found, expected):
            return ""
        return f"{found!r}, expected {expected!r}"
    if found is None:
        # No gradient where one device has a gradient of zeros means the same.
        return "missing" if expected.count_nonzero() else ""
    try:
        whole = joined(found, values and same_replicas)
    except LayoutError as error:
        return str(error)
    return difference(whole, expected, tolerance, values)


def difference(
    found: torch.Tensor | None,
    expected: torch.Tensor | None,
    tolerance: float | None = None,
    values: bool = True,
) -> str:
    """Tell how two plain tensors differ: one is missing, shape, dtype, or values; empty if they
    are close.
    """
    if found is None or expected is None:
        return "missing" if found is None else "not expected"
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"{found.dtype}, expected {expected.dtype}"
    return how_far(found, expected, tolerance) if values else ""


def joined(tensor: torch.Tensor, same_replicas: bool) -> torch.Tensor:
    """The whole tensor that all ranks hold together, or the one value of a tensor that is no
    DTensor; raises LayoutError if ranks hold something else.
    """
    if isinstance(tensor, DTensor):
        return whole_tensor(tensor, same_replicas)
    if not isinstance(tensor, dtensor_specs.LocalTensor):
        return tensor.detach()
    try:
        return tensor.reconcile().detach()
    except AssertionError:
        raise LayoutError("plain tensors differ from rank to rank") from None


def how_far(one: torch.Tensor, other: torch.Tensor, tolerance: float | None = None) -> str:
    """Empty if close, for their dtype by default, else by how much they differ at most."""
    one, other = resolved(one), resolved(other)
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    step = _STEP_OF_FLOAT8.get(one.dtype)
    if step is not None:
        return how_far(one.float(), other.float(), max(step, tolerance or 0.0))
    allowed = TOLERANCES_OF_SUMS.get(one.dtype)
    if allowed is None:
        return "" if torch.equal(one, other) else f"{int((one != other).sum())} values differ"
    if one.dtype is torch.complex32:  # few operators take it
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    # Relative to the whole tensor: an element near zero may be a difference of large ones.
    scale = other.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if other.numel() else 0.0
    allowed = allowed if tolerance is None else tolerance
    close = torch.allclose(one, other, rtol=allowed, atol=allowed * max(1.0, scale), equal_nan=True)
    if close:
        return ""
    return f"values differ by at most {(one - other).abs().max().item():.3g}"


def tolerance_of(*tensors: object) -> float:
    """The tolerance of the least precise among the tensors: what is computed from it is no
    better.
    """
    return max(
        (TOLERANCES_OF_SUMS.get(t.dtype, 0.0) for t in tensors if isinstance(t, torch.Tensor)),
        default=0.0,
    )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        both_nan = one != one and other != other
        return both_nan or math.isclose(one, other, rel_tol=1e-8, abs_tol=1e-8)
    return bool(one == other)


# Makes the scalar that the backward starts from, of the outputs; None where there is none.
Loss = Callable[[Any], torch.Tensor | None]


def run_step(
    run: Callable[..., object],
    parameters: Mapping[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss,
) -> dict[str, torch.Tensor]:
    """Run forward and backward. The parameters' gradients are then as they were."""
    before = {name: each.grad for name, each in parameters.items()}
    for each in parameters.values():
        each.grad = None
    try:
        outputs = run(*args, **kwargs)
        start = loss(outputs)
        if start is not None and start.requires_grad:
            start.backward()
        found = {f"output {at}": out.detach() for at, out in enumerate(tensors_of(outputs))}
        given = [*enumerate(args), *kwargs.items()]
        named = {**parameters, **{f"input {name}": each for name, each in given}}
        for name, each in named.items():
            if isinstance(each, torch.Tensor) and each.grad is not None:
                found[f"gradient of {name}"] = each.grad.detach()
        return found
    finally:
        for name, each in parameters.items():
            each.grad = before[name]


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def parameters_of(model: object) -> dict[str, torch.Tensor]:
    """A module's parameters by name; none of a function."""
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}


def new_leaf(value: object) -> object:
    """A tensor of equal values that gradients end at, as they did before; other values as they
    are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        # A clone of a pending sum is a finished one in upstream.
        local = value._local_tensor.clone()
        mesh, grad = value.device_mesh, value.requires_grad
        return dtensor_ranks.dtensor_of_ranks(local, mesh, value.placements, value, grad)
    return value.detach().clone().requires_grad_(value.requires_grad)
