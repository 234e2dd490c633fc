"""Register splitting: its pass before the scheduler, and the option ``split``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from inductor_passes import registry
from inductor_passes.errors import OptionError
from inductor_passes.extension import Extension, Option
from inductor_passes.graph_pass import ScheduleOptions
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.split.split_pass import OPTION, WHOLE, SplitRegions

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions


def checked(value: Any, options: PassOptions) -> int | str:
    """Return a value of the option. Raises OptionError."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if not (value >= 2 if number else value in (WHOLE, "auto")):
        raise OptionError(
            f"Option 'split' is {value!r}.",
            "A graph is cut into 2 parts or more; fewer leave it whole.",
            "It takes 'off', 'auto' or a whole number from 2 on.",
        )
    if value != WHOLE and not isinstance(options.schedule, ScheduleOptions):
        raise OptionError(
            f"Option 'split' is {value!r}, and 'schedule' is {options.schedule!r}.",
            "Parts gain by the order that the scheduler gives them, and by nothing else.",
            "Leave 'schedule' out, or set 'split' to 'off'.",
        )
    found: int | str = value
    return found


class Splitting(Extension):
    """The option that says whether, and into how many parts, graphs are cut."""

    name = "splitting"
    options: ClassVar[Mapping[str, Option]] = {
        OPTION: Option(
            "``off``; a number of parts, 2 or more, that regions of a graph are cut into, so that "
            "one part computes while another's collective is on its way; or ``auto``, as many as "
            "are predicted to pay, if any.",
            WHOLE,
            checked,
        )
    }


def register() -> None:
    """Add the pass and its option."""
    registry.register(SplitRegions, before=ScheduleGraph.name)
    registry.register_extension(Splitting())
