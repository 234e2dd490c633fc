"""``torch.cond``, ``while_loop`` and nested compiled regions over DTensors.

Upstream has no rule for DTensors in a branch. Here both branches are traced and one result is
taken: whatever they launch, all ranks launch it. A loop breaks the graph.

Upstream keeps the region as a graph of its own, which AOTAutograd runs on local tensors. Here it is
traced in line, as eager mode runs it, and so are two others:

- What FSDP2's or DDP's forward calls: it reads parameters that its graph has gathered or taken to
  average, and Dynamo looks for sources of them.
- What the plugin's backend compiles with gradients: the region's forward hands views of its inputs
  to its backward, and Inductor uses the memory of inputs that the graph has computed again.

Other regions of plain tensors stay upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.torch_compat import dynamo_building, dynamo_calls, dynamo_dtensors, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import unsharded_parameters

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker


def in_line(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    """The result of the region's function, traced here; None leaves it to upstream."""
    function, *given = args
    read = [*args, *kwargs.values()]  # the function too: a module, or one of its methods
    trains = dynamo_calls.is_our_backend(tx) and torch.is_grad_enabled()
    if (
        trains
        or unsharded_parameters.is_in_forward(tx)
        or any(
            _is_module_of_dtensors(dynamo_building.realized(each))
            or dynamo_dtensors.holds_tensor_of(each, DTensor)
            for each in read
        )
    ):
        return function.call_function(tx, given, kwargs)
    return None


def _is_module_of_dtensors(tracker: Any) -> bool:
    module = dynamo_building.value_of(tracker)
    return isinstance(module, nn.Module) and any(
        isinstance(each, DTensor) for each in [*module.parameters(), *module.buffers()]
    )


def regions_patches() -> list[Patch]:
    """List the patches that enabling makes for regions."""
    return dynamo_trackers.on_function(dynamo_calls.CALL, in_line)


def both(
    condition: object,
    one: Callable[..., object],
    other: Callable[..., object],
    operands: Sequence[object],
) -> object:
    """Traced: what ``torch.cond`` gives."""
    if isinstance(condition, DTensor):
        condition = condition.full_tensor()
    return pytree.tree_map(lambda a, b: taken(condition, a, b), one(*operands), other(*operands))


def taken(condition: Any, one: Any, other: Any) -> Any:
    """Traced: one of two results, laid out as the first."""
    if not isinstance(one, DTensor):
        return torch.where(condition, one, other)
    if other.placements != one.placements:
        other = other.redistribute(one.device_mesh, one.placements)
    local = torch.where(condition, one.to_local(), other.to_local())
    return DTensor.from_local(
        local,
        one.device_mesh,
        one.placements,
        run_check=False,
        shape=one.shape,
        stride=one.stride(),
    )


def _cond(tx: object, args: list[object], kwargs: dict[str, VariableTracker]) -> object:
    if len(args) != 4 or kwargs:
        return None
    condition, operands = args[0], args[3]
    if not any(dynamo_dtensors.holds_tensor_of(each, DTensor) for each in (condition, operands)):
        return None
    if not dynamo_dtensors.is_tensor_of(condition, torch.Tensor):
        return None  # a number or a bool, which upstream decides while tracing
    if torch.is_grad_enabled() and dynamo_dtensors.holds_gradients(operands):
        dynamo_building.graph_break(
            "torch.cond over DTensors that require gradients",
            "torch.cond",
            "Both branches are computed and one result is taken: what is infinite in the other "
            "would make gradients NaN.",
            "Give it local tensors, x.to_local(), or compute under torch.no_grad().",
        )
    return dynamo_building.call_traced(tx, both, args, {})


def _while(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    if any(dynamo_dtensors.holds_tensor_of(each, DTensor) for each in [*args, *kwargs.values()]):
        dynamo_building.graph_break(
            "while_loop over DTensors",
            "torch.while_loop",
            "How often a loop runs is known when the graph runs; its body is a graph of local "
            "tensors.",
            "Give it local tensors, x.to_local().",
        )
    return None


def branches_patches() -> list[Patch]:
    """List the patches that enabling makes for branches and loops."""
    return [
        *dynamo_trackers.on_function(torch.ops.higher_order.cond, _cond),
        *dynamo_trackers.on_function(torch.ops.higher_order.while_loop, _while),
    ]
