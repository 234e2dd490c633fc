"""One step of a model: its outputs, and the gradients of parameters and inputs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.torch_compat import dtensor_ranks

# Makes the scalar that the backward starts from, of the outputs; None where there is none.
Loss = Callable[[Any], torch.Tensor | None]


def run_step(
    run: Callable[..., Any],
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


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    """A module's parameters by name; none of a function."""
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}


def new_leaf(value: Any) -> Any:
    """A tensor of equal values that gradients end at, as they did before; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        # A clone of a pending sum is a finished one in stock.
        local = value._local_tensor.clone()
        mesh, grad = value.device_mesh, value.requires_grad
        return dtensor_ranks.dtensor_of_ranks(local, mesh, value.placements, value, grad)
    return value.detach().clone().requires_grad_(value.requires_grad)
