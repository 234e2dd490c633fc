"""``enable()``, ``disable()``, ``enabled()``: one switch for the process.

Everything that enabling changes in torch is a ``Change`` with a way back, kept on one stack, so
that ``disable()`` leaves torch as it was. A function compiled while enabled keeps working after
that: its guards need no object of ours in torch's tables. When one of them fails, upstream's rules
trace the function anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_dist import graph_compile, plugins, settings, switch
from dynamo_dist.errors import ActivationError
from dynamo_dist.settings import DistConfig
from dynamo_dist.settings import digest as digest
from dynamo_dist.switch import is_enabled

if TYPE_CHECKING:
    from dynamo_dist.torch_compat.patching import Patch

log = logging.getLogger(__name__)

BACKEND = EntryPoint("dynamo_dist", "dynamo_dist.backend:dynamo_dist", "torch_dynamo_backends")

# A mesh that is being made there lacks what its tracker is asked for.
MESHES = Path("torch/distributed/device_mesh.py")

# Where functions are that may be compiled as they are; all others are traced in graphs of their
# callers, or run around them.
COMPILED = ("tracing/modules.py", "tracing/ddp_average.py", "tracing/fsdp2_gather.py")

# Where functions are that stand in for torch's dispatching, and call nothing of the user's; plugins
# name folders of theirs.
DISPATCHING = ("sharding/", "torch_compat/dtensor_")


def enable(*, inductor: bool | Mapping[str, Any] = False) -> None:
    """Change torch's tables so that distributed programs trace; nothing happens if it is on
    already. With ``inductor``, ``backend="inductor"`` compiles as ``backend="dynamo_dist"`` does.

    ``inductor``: graphs that ``backend="inductor"``, torch's default, compiles in this process are
    compiled as by ``backend="dynamo_dist"``, for programs that cannot name a backend; a mapping is
    our options (``inductor_passes.PassOptions``) for compiles that are given no other. So does
    ``DYNAMO_DIST_INDUCTOR=1``.

    Once on, one ``disable()`` turns all of it off, however often it was enabled. Raises
    UnsupportedTorchError, ConfigError for a bad environment variable, OptionError for an unknown
    option, and ActivationError if a change fails, after undoing the others.
    """
    settings.check()
    config = DistConfig.from_env()
    options = graph_compile.checked(inductor if isinstance(inductor, Mapping) else {})
    if inductor is not False:
        config = dataclasses.replace(config, inductor=True)

    from dynamo_dist.torch_compat import dynamo_compiler
    from dynamo_dist.tracing import trackers

    with dynamo_compiler.compile_lock:
        if is_enabled():
            if config.inductor and (options or graph_compile.taken() is None):
                switch.apply([graph_compile.taking(options)])
            return
        plugins.read_plugins()
        switch.apply(patches(config, options))
        log.info("enabled: trackers %s", [entry.name for entry in trackers.active(config)])


def patches(config: DistConfig, options: Mapping[str, Any] | None = None) -> list[Patch]:
    """Everything that enabling does to torch, in order; nothing is applied here.

    ``options``: ours for compiles by ``backend="inductor"``, where ``config.inductor`` asks for
    these.
    """
    from dynamo_dist import graph_compile
    from dynamo_dist.diagnostics import live
    from dynamo_dist.diagnostics.live import Listen
    from dynamo_dist.runtime import calls, gradients, guards, recompiles
    from dynamo_dist.sharding import registration
    from dynamo_dist.sharding.rules import registry as sharding
    from dynamo_dist.torch_compat import dynamo_compiler, dynamo_frames, inductor_cpp
    from dynamo_dist.tracing import c10d as lowering
    from dynamo_dist.tracing import dtensor_patches as dtensor
    from dynamo_dist.tracing import hooks, modules, trackers

    return [
        dynamo_compiler.BackendEntryPoint(BACKEND),
        *trackers.patches(config),
        *lowering.patches(config),
        *dtensor.patches(config),
        *modules.patches(config),
        *guards.patches(),
        *recompiles.patches(),
        *calls.wrapping_patches(),
        *gradients.gradients_patches(),
        *calls.below_autograd_patches(),
        *sharding.patches(config),
        *registration.patches(),
        *gradients.double_backward_patches(),  # around what sharding sets there
        *hooks.patches(),
        *live.patches(),
        Listen(),
        dynamo_compiler.CacheKeyTag(f"dynamo_dist-{digest(config)}"),
        *inductor_cpp.probed_once_a_host(),
        *inductor_cpp.few_libraries(),
        *graph_compile.patches(),
        dynamo_frames.SkippedFrames(),
        dynamo_frames.frames_left_alone(_runs_in_eager, _dispatches),
        *([graph_compile.taking(options or {})] if config.inductor else []),
    ]


def disable() -> None:
    """Restore every table of torch as it was before ``enable()``; nothing happens if it is off.

    Raises ActivationError if a change cannot be undone, after undoing the others: a place that
    somebody else has changed since is left to them, and named.
    """
    if not is_enabled():
        return

    from dynamo_dist.torch_compat import dynamo_compiler

    with dynamo_compiler.compile_lock:
        if failures := switch.undo():
            raise ActivationError(
                f"disable() could not undo {'; '.join(failures)}.",
                "All other changes are undone.",
                "Take the other change back first, or restart the process to be sure of upstream "
                "behaviour.",
            )
        log.info("disabled")


@contextlib.contextmanager
def enabled(*, inductor: bool | Mapping[str, Any] = False) -> Iterator[None]:
    """Enable inside the block, then restore the previous state, on or off, whatever the block did.

    ``inductor``: as ``enable()`` takes it.
    """
    with restored():
        enable(inductor=inductor)
        yield


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the state from before the block, on or off, when the block ends."""
    was_on, options = is_enabled(), graph_compile.taken()
    try:
        yield
    finally:
        # Not asked for again where ``enable()`` itself failed.
        if was_on and not is_enabled():
            enable(inductor=False if options is None else options)
        elif not was_on:
            disable()
        graph_compile.restore(options)


@cache
def _runs_in_eager(file: str) -> bool:
    root = Path(__file__).parent
    path = Path(file)
    if path.parts[-3:] == MESHES.parts:
        return True
    if path.is_relative_to(root.parent / "inductor_passes"):
        return True
    return path.is_relative_to(root) and not any(
        path.is_relative_to(root / part) for part in COMPILED
    )


@cache
def _dispatches(file: str) -> bool:
    root = Path(__file__).parent.as_posix()
    folders = [Path(each.folder).as_posix() for each in plugins.frame_compilers if each.folder]
    starts = (*(f"{root}/{part}" for part in DISPATCHING), *(f"{folder}/" for folder in folders))
    return Path(file).as_posix().startswith(starts)
