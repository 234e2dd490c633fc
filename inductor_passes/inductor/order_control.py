"""Own the order of a graph: while the scheduler is on, Inductor's own scheduling is off."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from inductor_passes.torch_compat import inductor

log = logging.getLogger(__name__)

# Everything in Inductor that moves a launch or a wait, by configuration key and its off value.
STOCK_SCHEDULERS: Mapping[str, object] = {
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "enable_simple_overlap": False,
    "_micro_pipeline_tp": False,
    "_fuse_ddp_communication": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}


def stock_schedulers_on(patches: Mapping[str, Any]) -> dict[str, object]:
    """Stock's schedulers that would run under the current configuration and ``patches``."""
    known = inductor.config_keys()
    found = {}
    for key, off in STOCK_SCHEDULERS.items():
        if key in known:
            value = patches[key] if key in patches else inductor.get_config(key)
            if value != off and value is not None:
                found[key] = value
    return found


def take_ownership(patches: Mapping[str, Any]) -> dict[str, object]:
    """Patches that switch stock's schedulers off, with a warning for what the user had asked for."""
    running = stock_schedulers_on(patches)
    say_taken(
        running,
        patches,
        "Inductor's own scheduling (%s) is off in this compile: two schedulers undo each "
        "other, and the pass 'schedule' owns it. Use options={'schedule': 'off'} "
        "to let Inductor's run instead.",
    )
    if running:
        log.info("Inductor's own scheduling is off in this compile: %s", ", ".join(sorted(running)))
    return {key: STOCK_SCHEDULERS[key] for key in running}


# What has been said of a key and of where it was set: once in a process.
_said: set[tuple[str, str]] = set()


def say_taken(keys: Iterable[str], patches: Mapping[str, Any], message: str) -> None:
    """Warn, once in a process, of those of ``keys`` that the user has set, by options or for the process.

    ``message`` has one ``%s`` for them. What torch has on by default was asked for by nobody.
    """
    asked = []
    for key in sorted(keys):
        given = key in patches
        if given or inductor.is_config_set(key):
            where = "options" if given else "torch._inductor.config"
            if (key, where) not in _said:
                _said.add((key, where))
                asked.append(f"{key}, set in {where}")
    if asked:
        log.warning(message, "; ".join(asked))
