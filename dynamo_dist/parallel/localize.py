"""``localize``: parameters registered as the local tensors of DTensors, which forward makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from dynamo_dist.errors import LocalizeError
from dynamo_dist.parallel.modules import is_managed
from dynamo_dist.parallel.pickling import reduced_as
from dynamo_dist.torch_compat import wrappers

_LAYOUTS = "_localized_parameters"


class _Layout:
    """The layout of a parameter's local tensors; ``shape`` and ``stride`` are global."""

    def __init__(self, param: DTensor) -> None:
        self.mesh: DeviceMesh = param.device_mesh
        self.placements: tuple[Placement, ...] = tuple(param.placements)
        self.shape, self.stride = param.shape, param.stride()

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that tells layouts apart; valid as long as this one lives."""
        # A mesh that counts as equal may have other groups.
        return id(self.mesh), self.placements, self.shape, self.stride

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layout:
        return self

    def whole(self, local: torch.Tensor) -> DTensor:
        """The DTensor of these local tensors, and of their gradients; a DTensor (set since) as it is."""
        if isinstance(local, DTensor):
            return local
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``, a DTensor, or a tensor of the global shape equal on all ranks."""
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)
        with torch.no_grad():
            local: torch.Tensor = value.redistribute(self.mesh, self.placements).to_local()
        return local


def localize(module: nn.Module) -> nn.Module:
    """Register local tensors in place of DTensor parameters, which costs a compiled step less; in place, and returned.

    Names stay. ``module.weight`` is a DTensor as before, made of the registered tensor by
    ``DTensor.from_local`` inside the graph, so forward needs no change. ``parameters()``, and so an
    optimizer, are given plain tensors: this rank's part, in the parameter's placements, and so are
    gradients. ``state_dict()`` still holds DTensors, and ``load_state_dict`` takes them.

    What is computed over all elements of parameters or gradients must be told: see
    ``localized_dtensors``. Make the optimizer afterwards.

    Raises:
        LocalizeError: there is no DTensor parameter; one that is ``Partial`` or has hooks;
            a module under ``data_parallel``, FSDP2 or DDP; a recurrent one, which holds its parameters twice.
    """
    owners = [(name, each, _parameters(name, each)) for name, each in module.named_modules()]
    if not any(params for _, _, params in owners):
        raise LocalizeError(
            "no parameter of the module is a DTensor.",
            fix="Call localize after parallelize_module or distribute_module, and once.",
        )
    made: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for _, owner, params in owners:
        for key, (param, layout) in params.items():
            if id(param) not in made:
                made[id(param)] = _localized(param, layout)
            owner._parameters[key] = made[id(param)]
        if params:
            layouts = {key: layout for key, (_, layout) in params.items()}
            owner.__class__ = _subclass(type(owner), layouts)
            owner.register_state_dict_post_hook(_put_dtensors)
            owner.register_load_state_dict_pre_hook(_take_dtensors)
    return module


def localized_dtensors(module: nn.Module) -> dict[str, DTensor]:
    """The localized parameters of ``module`` by name, as DTensors that share memory with them; ``.grad`` too.

    For what is computed over all ranks' elements: ``clip_grad_norm_(localized_dtensors(m).values(), 1.0)``
    scales the gradients of ``m``, and ``torch.linalg.vector_norm`` of one is that of the whole. Made anew by each call.
    """
    found: dict[str, DTensor] = {}
    for prefix, owner in module.named_modules():
        for key, layout in getattr(type(owner), _LAYOUTS, {}).items():
            param = owner._parameters[key]
            if param is not None:
                whole = layout.whole(param.detach()).requires_grad_(param.requires_grad)
                if param.grad is not None:
                    whole.grad = layout.whole(param.grad)
                found[f"{prefix}.{key}" if prefix else key] = whole
    return found


def _parameters(name: str, owner: nn.Module) -> dict[str, tuple[DTensor, _Layout]]:
    registered: dict[str, Any] = dict(owner._parameters)
    params = {
        key: (param, _Layout(param))
        for key, param in registered.items()
        if isinstance(param, DTensor)
    }
    where = name or "the module"
    if is_managed(owner) or isinstance(owner, wrappers.OTHER_WRAPPERS):
        raise LocalizeError(
            f"{where} is data parallel.",
            "What gathers its parameters needs them as DTensors.",
            "Use localize for modules under tensor parallelism alone.",
        )
    if params and isinstance(owner, nn.RNNBase):
        raise LocalizeError(
            f"{where} is a {type(owner).__name__}.",
            "It holds its parameters a second time, in a list that would go stale.",
            "Localize the submodules beside it one by one.",
        )
    for key, (param, layout) in params.items():
        if any(placement.is_partial() for placement in layout.placements):
            raise LocalizeError(
                f"{where}.{key} is a sum of parts: {layout.placements}.",
                "Its gradient has other placements than itself.",
                "Redistribute it first.",
            )
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise LocalizeError(
                f"{where}.{key} has hooks on its gradient.",
                "They would be given a local tensor.",
                "Register them on the localized parameter, after localize.",
            )
    return params


def _localized(param: DTensor, layout: _Layout) -> nn.Parameter:
    local = nn.Parameter(layout.local(param), requires_grad=param.requires_grad)
    if param.grad is not None:
        local.grad = layout.local(param.grad)
    return local


# A class for each combination, so that modules alike are served by one compiled function; held by its modules.
_classes: WeakValueDictionary[Any, type[nn.Module]] = WeakValueDictionary()


def _subclass(base: type[nn.Module], layouts: Mapping[str, _Layout]) -> type[nn.Module]:
    key = base, tuple((name, layout.key) for name, layout in layouts.items())
    made = _classes.get(key)
    if made is None:
        members: dict[str, Any] = {name: _read(name, layout) for name, layout in layouts.items()}
        members[_LAYOUTS] = dict(layouts)
        members["__reduce_ex__"] = reduced_as(base, _subclass, dict(layouts))
        made = _classes[key] = type(f"Localized{base.__name__}", (base,), members)
    return made


def _read(name: str, layout: _Layout) -> property:
    def read(self: nn.Module) -> DTensor | None:
        param = self._parameters[name]
        return None if param is None else layout.whole(param)

    return property(read)


def _put_dtensors(owner: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key, layout in getattr(type(owner), _LAYOUTS).items():
        if (value := state.get(prefix + key)) is not None:
            state[prefix + key] = layout.whole(value)


def _take_dtensors(owner: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key, layout in getattr(type(owner), _LAYOUTS).items():
        value, param = state.get(prefix + key), owner._parameters[key]
        if value is not None and not isinstance(param, DTensor):
            state[prefix + key] = layout.local(value)
