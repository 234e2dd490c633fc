"""``verify``: a training step of a distributed model against the same step on one device."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_dist
from dynamo_dist.errors import VerifyError
from dynamo_dist.numerics.differences import (
    difference_from_one_device,
    joined,
    new_leaf,
    parameters_of,
    run_step,
    tensors_of,
    tolerance_of,
)
from dynamo_dist.numerics.ranks import LayoutError, whole_tensor
from dynamo_dist.torch_compat import dtensor_ranks

Outputs = Any
_NOT_THE_USERS = tuple(
    str(Path(root).parent) + "/" for root in (torch.__file__, dynamo_dist.__file__)
)


@dataclass(frozen=True, slots=True)
class Checked:
    """One operator in one layout. ``problem`` is empty if it computed what one device computes."""

    op: str
    layout: str
    problem: str
    line: str


@dataclass
class Operators(TorchDispatchMode):
    """While active, checks each operator on DTensors, once for each layout, shape and argument.

    The whole tensors are joined from what the ranks hold before the call, so that an error of one
    operator is not charged to those after it. ``checked`` lists what was seen, in order.
    """

    checked: list[Checked] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not distributed or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        key = f"{func} {pytree.tree_map_only(torch.Tensor, _describe, (args, kwargs))}"
        if key in self._seen:
            return func(*args, **kwargs)
        self._seen.add(key)
        layout = " ".join(str(leaf.placements) for leaf in distributed)
        try:
            whole_args, whole_kwargs = pytree.tree_map_only(torch.Tensor, _whole, (args, kwargs))
        except LayoutError as error:
            self._record(func, layout, f"an argument is broken already: {error}")
            return func(*args, **kwargs)
        results = func(*args, **kwargs)
        with dtensor_ranks.one_device():
            expected = func(*whole_args, **whole_kwargs)
        if "empty" not in func._schema.name:
            found, wanted = pytree.tree_leaves(results), pytree.tree_leaves(expected)
            allowed = tolerance_of(*wanted, *pytree.tree_leaves((whole_args, whole_kwargs)))
            problems = [
                difference_from_one_device(a, b, tolerance=allowed)
                for a, b in zip(found, wanted, strict=False)
            ]
            self._record(func, layout, next((p for p in problems if p), ""))
        return results

    def _record(self, func: Callable[..., object], layout: str, problem: str) -> None:
        self.checked.append(Checked(str(func), layout, problem, _line()))


def _describe(tensor: torch.Tensor) -> str:
    placements = tensor.placements if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype} {placements}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    # Memory that is about to be filled differs from rank to rank, and may.
    return joined(tensor, False).detach().clone()


def _line() -> str:
    """The innermost line that is neither torch's nor ours; empty in a backward pass."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of ``verify``.

    ``operators`` is each operator in each layout that the step used, in order; ``differences``
    names each output and each gradient that differs, and says how.
    """

    operators: tuple[Checked, ...]
    differences: Mapping[str, str]

    @property
    def first(self) -> Checked | None:
        """The first operator that computed something else than one device."""
        return next((each for each in self.operators if each.problem), None)

    @property
    def ok(self) -> bool:
        """Return whether every operator and the whole step are right."""
        return self.first is None and not self.differences

    def __str__(self) -> str:
        layouts = len(self.operators)
        kinds = len({each.op for each in self.operators})
        if self.ok:
            return f"right: {kinds} operators in {layouts} layouts, and the whole step"
        lines = [f"wrong, of {kinds} operators in {layouts} layouts:"]
        if self.first is not None:
            where = f" at {self.first.line}" if self.first.line else " in the backward pass"
            lines.append(
                f"  first {self.first.op} on {self.first.layout}{where}: {self.first.problem}"
            )
        lines += [f"  {name}: {problem}" for name, problem in self.differences.items()]
        return "\n".join(lines)


def verify(
    model: Callable[..., Outputs],
    inputs: Sequence[Any],
    *,
    reference: Callable[..., Outputs] | None = None,
) -> Report:
    """Run one step of ``model(*inputs)``, forward and backward, and compare it with one device.

    ``model`` has DTensor parameters, or takes DTensors. Every rank of its mesh calls ``verify``; or
    one process does, inside ``numerics.ranks.all_ranks()``, for all of them.

    Every operator is compared with the same operator on whole tensors, once for each layout.
    Outputs and gradients are compared with those of ``reference`` on whole inputs. By default that
    is a copy of the model with whole parameters, without the hooks of a tensor-parallel plan.
    Parameters and gradients of ``model`` stay as they are.

    Whole tensors are gathered for this: it is for a small configuration of the model. Raises
    VerifyError if nothing is distributed, and for a model without a copy on one device.
    """
    tensors = [*parameters_of(model).values(), *tensors_of(list(inputs))]
    if not any(isinstance(each, DTensor) for each in tensors):
        raise VerifyError(
            "verify() got a model and inputs without a DTensor.",
            "There is nothing distributed to compare.",
            "Distribute the model first, e.g. with parallelize_module.",
        )
    operators = Operators()
    with operators, torch.enable_grad():
        given = [new_leaf(each) for each in inputs]
        found = run_step(model, parameters_of(model), given, {}, _squares)
    whole = on_one_device(model) if reference is None else reference
    with dtensor_ranks.one_device(), torch.enable_grad():
        given = [new_leaf(_gathered(each)) for each in inputs]
        expected = run_step(whole, parameters_of(whole), given, {}, _squares)
    allowed = max((tolerance_of(each) for each in expected.values()), default=0.0)
    differences = {
        name: problem
        for name, value in expected.items()
        if (problem := difference_from_one_device(found.get(name), value, tolerance=allowed))
    }
    return Report(tuple(operators.checked), differences)


def on_one_device(model: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """A copy of a module with whole parameters and buffers, without hooks that distribute."""
    if not isinstance(model, nn.Module):
        return model
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise VerifyError(
            f"verify() could not copy the model: {error}.",
            "The same step on one device needs whole parameters.",
            "Pass the model before it was distributed: verify(model, inputs, reference=...).",
        ) from error
    for module in copied.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if isinstance(value, DTensor):
                    whole = _gathered(value)
                    table[name] = (
                        nn.Parameter(whole, value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else whole
                    )
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _distributes(hook)]:
                del hooks[key]
    return copied


def _distributes(hook: Callable[..., object]) -> bool:
    module = getattr(getattr(hook, "func", hook), "__module__", "") or ""
    return module.startswith("torch.distributed.") or "tensor_parallel" in module


def _squares(outputs: Outputs) -> torch.Tensor | None:
    trained = [
        each.full_tensor() if isinstance(each, DTensor) else each
        for each in tensors_of(outputs)
        if each.requires_grad
    ]
    return torch.stack([(each * each).sum() for each in trained]).sum() if trained else None


def _gathered(value: object) -> Any:
    if not isinstance(value, DTensor):
        return value
    try:
        return whole_tensor(value).clone().requires_grad_(value.requires_grad)
    except LayoutError as error:
        raise VerifyError(
            f"verify() got a broken DTensor: {error}.",
            "Its ranks do not hold what its placements say.",
            "Make it with distribute_tensor, or correct what was given to DTensor.from_local.",
        ) from error
