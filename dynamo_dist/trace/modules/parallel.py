"""Modules of DDP and FSDP2 inside a compiled function: refused, each with the way that works.

DDP and FSDP2 do their work around a module's forward and in hooks of its parameters, with state between calls: a
reducer in C++, storages that grow and shrink. A graph holds one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import building, modules

_FSDP_WHY = (
    "FSDP2 gathers a module's parameters before its forward and frees them after it, in storages that "
    "grow and shrink: it runs around a graph, not in one."
)
_FSDP_FIX = (
    "Compile the sharded blocks instead of what calls them:\n"
    "    for block in model.layers:\n"
    "        block.compile()\n"
    "        fully_shard(block)"
)


def refuse_ddp() -> NoReturn:
    """Break the graph where a DDP module is called."""
    building.graph_break(
        "DistributedDataParallel module called in a compiled function",
        "DistributedDataParallel.forward",
        "DDP prepares its reducer around each forward, and hides its reductions under the backward of "
        "graphs that are split by its buckets, which one graph is not.",
        "Compile what DDP wraps: ddp = DistributedDataParallel(torch.compile(module, fullgraph=True))",
    )


def refuse_fsdp_call() -> NoReturn:
    """Break the graph where a sharded module is called."""
    building.graph_break(
        "FSDP2 module called in a compiled function", "fully_shard", _FSDP_WHY, _FSDP_FIX
    )


def refuse_fsdp_method(name: str) -> Callable[[], NoReturn]:
    """Return a function that breaks the graph where the program gathers or frees parameters itself."""

    def refuse() -> NoReturn:
        building.graph_break(
            "Parameters of an FSDP2 module gathered or freed in a compiled function",
            f"FSDPModule.{name}",
            _FSDP_WHY,
            f"Call it around the compiled function: model.{name}(); y = compiled(x)",
        )

    return refuse


def explain_state_dict(text: str) -> None:
    """Say what to write where this torch cannot trace the attribute that ``state_dict`` sets."""
    if "_metadata" in text:
        building.graph_break(
            "state_dict() in a compiled function",
            "Module.state_dict",
            "It sets an attribute of a dictionary, which this torch cannot trace.",
            "Take the tensors by name: {name: p.detach() for name, p in model.named_parameters()}",
        )


def changes() -> list[Change]:
    """List the changes that enabling makes for modules of DDP and FSDP2."""
    refused: dict[Any, Callable[[], NoReturn]] = {
        DistributedDataParallel.forward: refuse_ddp,
        FSDPModule.unshard: refuse_fsdp_method("unshard"),
        FSDPModule.reshard: refuse_fsdp_method("reshard"),
        **dict.fromkeys(modules.fsdp_hooks(), refuse_fsdp_call),
    }
    return modules.on_methods(refused, {nn.Module.state_dict: explain_state_dict})
