"""The state of a model and its inputs, and how to bring it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.errors import CompareError


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_call(inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a sequence of arguments, or a mapping."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def tensors_of(tree: object, root: str = "output") -> list[tuple[str, torch.Tensor]]:
    """Every tensor of a nested structure with its path below ``root``, in a fixed order."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = root + pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            found.append((name, leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):  # one that nobody registered with pytree
                found += tensors_of(getattr(leaf, field.name), f"{name}.{field.name}")
    return found


def fresh_copy(tree: object) -> Any:
    """The same structure with new leaf tensors of equal values, requiring gradients as before."""

    def copy(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, tree)


def devices_of(model: object, inputs: object) -> torch.device:
    """The one device that everything is on.

    Raises CompareError naming two tensors that are apart, or a mesh for another kind of device.
    """
    named = tensors_of(inputs, "input")
    if isinstance(model, nn.Module):
        named += [(f"parameter {n}", p) for n, p in model.named_parameters()]
        named += [(f"buffer {n}", b) for n, b in model.named_buffers()]
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            mesh, held = tensor.device_mesh.device_type, tensor.to_local().device.type
            if mesh != held:
                raise CompareError(
                    f"The {name} is a DTensor on a mesh for {mesh!r}, but its data is on {held!r}.",
                    "Collectives would look for the data on the mesh's device.",
                    f"Make the mesh with init_device_mesh({held!r}, ...), or move the data.",
                )
    placed = [(name, local(tensor).device) for name, tensor in named if tensor.dim() > 0]
    kinds = {device.type: name for name, device in reversed(placed)}
    if len(kinds) > 1:
        (first, first_name), (second, second_name) = sorted(kinds.items())[:2]
        raise CompareError(
            f"The {first_name} is on {first!r} and the {second_name} on {second!r}.",
            "A step cannot be timed across devices.",
            "Move model and inputs to one device.",
        )
    return placed[0][1] if placed else torch.device("cpu")


class Saved:
    """Parameters, buffers, gradients, mode and random state of a model, kept on the CPU.

    The model itself is run, not a copy: a deep copy keeps closures, such as the forward that
    tensor-parallel wrappers install, that still point at the original's parameters.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        self.module = model if isinstance(model, nn.Module) else None
        self.device = device
        self.values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.training: list[tuple[nn.Module, bool]] = []
        if self.module is not None:
            self.training = [(m, m.training) for m in self.module.modules()]
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                self.values.append((tensor, local(tensor.detach()).to("cpu", copy=True)))
            self.grads = [(p, p.grad) for p in self.module.parameters()]
        self.rng = torch.get_rng_state()
        self.device_rng = None if device.type == "cpu" else self._device_module().get_rng_state()

    def restore(self, *, grads: bool = False) -> None:
        """Values, mode and random state as they were; gradients cleared, or with ``grads`` as they were."""
        with torch.no_grad():
            for tensor, value in self.values:
                local(tensor.detach()).copy_(value)
        for module, training in self.training:
            module.training = training
        for parameter, grad in self.grads:
            parameter.grad = grad if grads else None
        self.restore_rng()

    def restore_rng(self) -> None:
        """The random state alone."""
        torch.set_rng_state(self.rng)
        if self.device_rng is not None:
            self._device_module().set_rng_state(self.device_rng)

    def drew_random_numbers(self) -> bool:
        """Return whether the random state moved since it was last restored."""
        if not torch.equal(torch.get_rng_state(), self.rng):
            return True
        if self.device_rng is None:
            return False
        return not torch.equal(self._device_module().get_rng_state(), self.device_rng)

    def _device_module(self) -> Any:
        return torch.get_device_module(self.device)


@contextmanager
def kept(model: object, device: torch.device) -> Iterator[Saved]:
    """Inside, the model may be run; afterwards everything is as it was."""
    saved = Saved(model, device)
    for parameter, _ in saved.grads:  # a backward would add to these in place
        parameter.grad = None
    try:
        yield saved
    finally:
        saved.restore(grads=True)


def gradients(model: object, inputs: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Local gradients by name, of the parameters and of the inputs that have one."""
    found = {}
    if isinstance(model, nn.Module):
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {path: t.grad for path, t in inputs if t.grad is not None}
    return {name: local(grad.detach()).clone() for name, grad in found.items()}
