"""Register the memory budget: its option, the pass that decides what is kept, and the cap on
schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from inductor_passes import registry
from inductor_passes.errors import OptionError
from inductor_passes.extension import Extension, Option
from inductor_passes.memory.budget import (
    OFFLOAD,
    OPTION,
    budget_bytes,
    checked,
    least_of_ranks,
)
from inductor_passes.memory.keep_within_budget import CapSchedule, KeepWithinBudget, MoveStates
from inductor_passes.ranks.collective_trace import place_of
from inductor_passes.schedule.schedule_pass import ScheduleGraph

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.pass_options import PassOptions


def _checked_offload(value: Any, options: PassOptions) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise OptionError(
            f"Option 'offload' is {value!r}.", "It is a choice.", "Give True, False or None."
        )
    return value


VALUES = "values"  # what may be moved, where the user has not said


class MemoryBudget(Extension):
    """The options that say how much memory a step may take, and where."""

    name = "memory"
    options: ClassVar[Mapping[str, Option]] = {
        OPTION: Option(
            'what a training step may take of a device: bytes, such as ``"60GiB"``, or a share of '
            "its memory, such as ``0.9``. What is kept from forward to backward, gathered again or "
            "computed again, and the order of all, are chosen for the least time within it. None "
            "keeps what the program says.",
            None,
            checked,
        ),
        OFFLOAD: Option(
            "whether values may wait for their backward in memory of the host, and the "
            "optimizer's states for their update. None allows it for values, on GPUs.",
            None,
            _checked_offload,
        ),
    }

    def resolved(self, options: PassOptions, gm: fx.GraphModule) -> PassOptions:
        if (given := options.extra.get(OPTION)) is None:
            return options
        values = (node.meta.get("example_value") for node in gm.graph.nodes)
        devices = (value.device for value in values if isinstance(value, torch.Tensor))
        device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        agreed = least_of_ranks(place_of(gm.graph), budget_bytes(given, device))
        # By default values alone: a step that fails while a state is away has lost it.
        offload = options.extra.get(OFFLOAD, VALUES if device.type != "cpu" else False)
        return replace(options, extra={**options.extra, OPTION: agreed, OFFLOAD: offload})


def register() -> None:
    """Add the options and the passes."""
    registry.register(KeepWithinBudget, before=ScheduleGraph.name)
    registry.register(CapSchedule, before=ScheduleGraph.name)
    registry.register(MoveStates, before=ScheduleGraph.name)
    registry.register_extension(MemoryBudget())
