"""``enable()``, ``disable()``, ``enabled()``: one switch for the process.

Everything that enabling changes in torch is a ``Change`` with a way back, kept on one stack, so that
``disable()`` leaves torch as it was. A function compiled while enabled keeps working after that: its
guards need nothing of ours in torch's tables, and when one fails it is traced anew by stock's rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_dist import switch, versions
from dynamo_dist.config import DistConfig
from dynamo_dist.errors import ActivationError
from dynamo_dist.switch import is_enabled
from inductor_passes.plugins import digest_of_sources

if TYPE_CHECKING:
    from dynamo_dist.torch_compat.changes import Change

log = logging.getLogger(__name__)

BACKEND = EntryPoint("dynamo_dist", "dynamo_dist.backend:dynamo_dist", "torch_dynamo_backends")

# Parts whose functions are there to be traced; all others run while torch dispatches.
TRACED = ("trace/lowering", "trace/modules", "parallel")


def enable() -> None:
    """Change torch's tables so that distributed programs trace; nothing happens if it is on already.

    Once on, one ``disable()`` turns it off, however often it was enabled. Raises
    UnsupportedTorchError, ConfigError for a bad environment variable, and ActivationError if a change
    fails, after undoing the others; so are they undone if a signal (Ctrl-C) comes meanwhile.
    """
    versions.check()
    config = DistConfig.from_env()

    from dynamo_dist import plugins
    from dynamo_dist.torch_compat.dynamo import compiler
    from dynamo_dist.trace.trackers import registry

    with compiler.compile_lock:
        if is_enabled():
            return
        plugins.read_plugins()
        switch.apply(changes(config))
        log.info("enabled: trackers %s", [entry.name for entry in registry.active(config)])


def changes(config: DistConfig) -> list[Change]:
    """Everything that enabling does to torch, in order; nothing is applied here."""
    from dynamo_dist.reporting import placements
    from dynamo_dist.reporting.live import Listen
    from dynamo_dist.run import below_autograd, gradients, guards, recompiles, wrapping
    from dynamo_dist.sharding import registration
    from dynamo_dist.sharding.rules import registry as sharding
    from dynamo_dist.torch_compat.dynamo import compiler, frames
    from dynamo_dist.trace.dtensor import registry as dtensor
    from dynamo_dist.trace.lowering import registry as lowering
    from dynamo_dist.trace.modules import registry as modules
    from dynamo_dist.trace.randomness import registry as randomness
    from dynamo_dist.trace.trackers import hooks, registry

    return [
        compiler.BackendEntryPoint(BACKEND),
        compiler.same_backend_twice(),
        *registry.changes(config),
        *lowering.changes(config),
        *dtensor.changes(config),
        *modules.changes(config),
        *randomness.changes(),
        *guards.changes(),
        *recompiles.changes(),
        *wrapping.changes(),
        *gradients.changes(),
        *below_autograd.changes(),
        *sharding.changes(config),
        *registration.changes(),
        *hooks.changes(),
        *placements.changes(),
        Listen(),
        compiler.CacheKeyTag(f"dynamo_dist-{digest(config)}"),
        frames.SkippedFrames(),
        frames.frames_left_alone(_runs_in_eager),
    ]


def disable() -> None:
    """Restore every table of torch as it was before ``enable()``; nothing happens if it is off.

    Raises ActivationError if a change cannot be undone, after undoing the others.
    """
    if not is_enabled():
        return

    from dynamo_dist.torch_compat.dynamo import compiler

    with compiler.compile_lock:
        if failures := switch.undo():
            raise ActivationError(
                f"disable() could not undo {', '.join(failures)}.",
                "Something else changed the same place of torch in the meantime.",
                "Restart the process to be sure of stock behaviour.",
            )
        log.info("disabled")


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enable inside the block and leave behind what was before, on or off, whatever the block did."""
    before = is_enabled()
    try:
        enable()
        yield
    finally:
        # Not asked for again where ``enable()`` itself failed.
        if before != is_enabled():
            (enable if before else disable)()


def digest(config: DistConfig) -> str:
    """Twelve hex digits over our sources, ``config`` and torch's version: part of torch's cache keys.

    Torch's caches see the graph, not the rules by which it was made; without this a state would be
    served the results of another.
    """
    import torch

    state = f"{digest_of_sources(__name__)} {sorted(config.trackers_off)} {torch.__version__}"
    return hashlib.sha256(state.encode()).hexdigest()[:12]


@cache
def _runs_in_eager(file: str) -> bool:
    root = Path(__file__).parent
    path = Path(file)
    if path.is_relative_to(root.parent / "inductor_passes"):
        return True
    return path.is_relative_to(root) and not any(
        path.is_relative_to(root / part) for part in TRACED
    )
