"""Register placement planning: the option ``plan``, and a part in the compile of each frame."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dynamo_dist.planning.cost import prices_of
from dynamo_dist.planning.repair import compile_repaired
from dynamo_dist.plugins import Code, Compile, FrameCompiler, register_frame_compiler
from dynamo_dist.settings import DistConfig, digest
from dynamo_dist.torch_compat import dynamo_compiler
from inductor_passes import registry
from inductor_passes.errors import OptionError
from inductor_passes.extension import Extension, Option

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.pass_options import PassOptions

OPTION, OFF, REPAIR = "plan", "off", "repair"


def checked(value: Any, options: PassOptions) -> str:
    """Return a value of the option. Raises OptionError."""
    plan = str(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if not plan.endswith(".json") and plan not in (OFF, REPAIR):
        raise OptionError(
            f"Option 'plan' is {plan!r}.", "", f"It takes one of {OFF!r}, {REPAIR!r}."
        )
    return plan


class Planning(Extension):
    """The option that says whether placements are planned, and by which file."""

    name = "planning"
    options: ClassVar[Mapping[str, Option]] = {
        OPTION: Option(
            "``off``; ``repair`` re-solves placements that the user has not set (DTensor programs, "
            'with ``backend="dynamo_dist"``); or a path ending in .json, a plan to follow, written '
            "if missing.",
            OFF,
            checked,
        )
    }


def compile_planned(
    gm: fx.GraphModule, inputs: Sequence[Any], compile_: Compile, options: PassOptions
) -> Code:
    """Compile a graph with the placements that the option asks for."""
    plan = options.extra.get(OPTION, OFF)
    if plan == OFF:
        return compile_(gm, inputs)
    return compile_repaired(
        gm,
        inputs,
        compile_,
        prices_of(options.topology, inputs),
        f"{digest(DistConfig.from_env())} {dynamo_compiler.cache_key_tag()}",
        None if plan == REPAIR else plan,
    )


def register() -> None:
    """Add the option, and what it does."""
    registry.register_extension(Planning())
    register_frame_compiler(FrameCompiler(compile_planned, str(Path(__file__).parent)))
