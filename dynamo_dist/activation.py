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

from dynamo_dist import interruption, versions
from dynamo_dist.config import DistConfig
from dynamo_dist.errors import ActivationError

if TYPE_CHECKING:
    from dynamo_dist._torch import Change

log = logging.getLogger(__name__)

BACKEND = EntryPoint("dynamo_dist", "dynamo_dist.backend:dynamo_dist", "torch_dynamo_backends")

# Parts whose functions are there to be traced; all others run while torch dispatches.
TRACED = ("lowering", "modules", "parallel")

_applied: list[Change] = []


def enable() -> None:
    """Change torch's tables so that distributed programs trace; nothing happens if it is on already.

    Once on, one ``disable()`` turns it off, however often it was enabled. Raises
    UnsupportedTorchError, ConfigError for a bad environment variable, and ActivationError if a change
    fails, after undoing the others; so are they undone if a signal (Ctrl-C) comes meanwhile.
    """
    versions.check()
    config = DistConfig.from_env()

    from dynamo_dist import _torch, plugins
    from dynamo_dist.trackers import registry

    with _torch.compile_lock:
        if _applied:
            return
        plugins.read_plugins()
        _apply(changes(config))
        log.info("enabled: trackers %s", [entry.name for entry in registry.active(config)])


def changes(config: DistConfig) -> list[Change]:
    """Everything that enabling does to torch, in order; nothing is applied here."""
    from dynamo_dist import _torch
    from dynamo_dist.dtensor import registry as dtensor
    from dynamo_dist.lowering import registry as lowering
    from dynamo_dist.modules import registry as modules
    from dynamo_dist.randomness import registry as randomness
    from dynamo_dist.reporting import logs, placements
    from dynamo_dist.runtime import below_autograd, gradients, guards, recompiles, wrapping
    from dynamo_dist.sharding import registration
    from dynamo_dist.sharding import registry as sharding
    from dynamo_dist.trackers import hooks, registry

    return [
        _torch.BackendEntryPoint(BACKEND),
        _torch.same_backend_twice(),
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
        logs.LogDecisions(),
        _torch.CacheKeyTag(f"dynamo_dist-{digest(config)}"),
        _torch.SkippedFrames(),
        _torch.frames_left_alone(_runs_in_eager),
    ]


def apply_also(changes: list[Change]) -> None:
    """Apply more changes while enabled; ``disable()`` undoes them with the others.

    Raises ActivationError if one fails, after undoing these.
    """
    _apply(changes)


def disable() -> None:
    """Restore every table of torch as it was before ``enable()``; nothing happens if it is off.

    Raises ActivationError if a change cannot be undone, after undoing the others.
    """
    if not _applied:
        return

    from dynamo_dist import _torch

    with _torch.compile_lock:
        if failures := _undo():
            raise ActivationError(
                f"disable() could not undo {', '.join(failures)}.",
                "Something else changed the same place of torch in the meantime.",
                "Restart the process to be sure of stock behaviour.",
            )
        log.info("disabled")


def is_enabled() -> bool:
    """Return whether ``enable()`` is in force in this process."""
    return bool(_applied)


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

    state = f"{_source_digest()} {sorted(config.trackers_off)} {torch.__version__}"
    return hashlib.sha256(state.encode()).hexdigest()[:12]


@cache
def _runs_in_eager(file: str) -> bool:
    root = Path(__file__).parent
    path = Path(file)
    if path.is_relative_to(root.parent / "inductor_passes"):
        return True
    return path.is_relative_to(root) and path.relative_to(root).parts[0] not in TRACED


@cache
def _source_digest() -> str:
    root = Path(__file__).parent
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return sources.hexdigest()


def _apply(changes: list[Change]) -> None:
    before = len(_applied)
    with interruption.held() as signals:
        for change in changes:
            try:
                change.apply()
            except Exception as error:
                _undo(before)
                raise ActivationError(
                    f"enable() failed at {_describe(change)}: {error!r}.",
                    "This torch is not as we know it.",
                    "Everything was restored. Report it with the output of: python -m dynamo_dist doctor",
                ) from error
            except BaseException:
                _undo(before)
                raise
            _applied.append(change)
            try:
                signals.deliver()
            except BaseException:
                _undo(before)
                raise


def _undo(down_to: int = 0) -> list[str]:
    """Undo all but the first ``down_to``, last first; the descriptions of those that failed."""
    failures = []
    with interruption.held():
        while len(_applied) > down_to:
            change = _applied.pop()
            try:
                change.undo()
            except Exception as error:
                log.warning("could not undo %s: %r", _describe(change), error)
                failures.append(_describe(change))
    return failures


def _describe(change: Change) -> str:
    where = getattr(change, "name", getattr(change, "key", ""))
    return f"{type(change).__name__}({where})" if where else type(change).__name__
