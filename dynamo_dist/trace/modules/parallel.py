"""Modules of DDP and FSDP2, and their state, inside a compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dynamo_dist.torch_compat import dynamo_building, dynamo_modules, fsdp
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.modules import averaged, fully_sharded, whole_parameters


def explain_state_dict(text: str) -> None:
    """Say what to write where this torch cannot trace the attribute that ``state_dict`` sets."""
    if "_metadata" in text:
        dynamo_building.graph_break(
            "state_dict() in a compiled function",
            "Module.state_dict",
            "It sets an attribute of a dictionary, which this torch cannot trace.",
            "Take the tensors by name: {name: p.detach() for name, p in model.named_parameters()}",
        )


def parallel_changes() -> list[Change]:
    """List the changes that enabling makes for modules of DDP and FSDP2."""
    answers: dict[Any, Callable[..., Any]] = {
        **fully_sharded.fsdp_answers(),
        **averaged.ddp_answers(),
    }
    return [
        *dynamo_modules.on_methods(
            answers, {nn.Module.state_dict: explain_state_dict}, fsdp.hook_of
        ),
        *whole_parameters.changes(),
        *averaged.changes(),
        *fully_sharded.changes(),
    ]
