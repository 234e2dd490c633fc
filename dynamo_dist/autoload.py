"""The ``torch.backends`` entry point: torch calls it at the end of ``import torch``.

It runs in every process of the environment, ours or not, so it does little:

- It registers our names with torch's logging, so that ``TORCH_LOGS="+dist"`` is understood.
- It starts to listen in a process of a script that is being explained.
- Where ``DYNAMO_DIST_INDUCTOR=1`` asks for it, it enables the plugin at the first
  ``torch.compile``.

Otherwise it imports only the standard library. No failure in it may reach ``import torch``.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

# What may stand in TORCH_LOGS -> the loggers that it sets.
LOG_NAMES = {
    "dynamo_dist": ["dynamo_dist"],
    "inductor_passes": ["inductor_passes"],
    "dist": ["dynamo_dist", "inductor_passes"],
}

# What may stand there besides: one kind of line each, and what torch's help says of it.
ARTIFACTS = {
    "dist_breaks": "Graph breaks as reports have them: your line, the cause, a fix as code",
    "dist_collectives": (
        "Each collective: your line, change of placement, bytes, predicted and exposed time"
    ),
    "dist_fuse": "Which collectives were fused into kernels, which not, and why",
    "dist_passes": (
        "Which cache a graph came from, or why none; the graph around each pass, as a diff"
    ),
    "dist_plan": "Placements that the planner has changed, and what that is worth",
    "dist_schedule": "One line for each graph that was scheduled",
}

log = logging.getLogger(__name__)


def register_log_names() -> None:
    """Register ``LOG_NAMES`` and ``ARTIFACTS`` where torch has not read TORCH_LOGS yet.

    Listens where ``python -m dynamo_dist explain`` started the process, and lets a first
    ``torch.compile`` enable the plugin where ``DYNAMO_DIST_INDUCTOR`` is set.

    Never raises: torch turns an exception here into a failed ``import torch``.
    """
    try:
        # Inside the try: the name is private, and a failed import here fails ``import torch``.
        from torch._logging import _internal

        if log_names_are_in_time(_internal):
            for alias, loggers in LOG_NAMES.items():
                _internal.register_log(alias, list(loggers))
            for artifact, description in ARTIFACTS.items():
                _internal.register_artifact(artifact, description, visible=True)
    except Exception as error:
        log.debug("no short names for TORCH_LOGS: %r", error)
    if "DYNAMO_DIST_EXPLAIN" in os.environ:
        _explain()
    if os.environ.get("DYNAMO_DIST_INDUCTOR", "") not in ("", "0"):
        _enable_when_needed()


def _explain() -> None:
    try:
        # It imports the diagnostics, which only a process that is explained needs.
        from dynamo_dist.cli import explained_process

        explained_process.install()
    except Exception as error:
        log.warning("this process is not explained: %r", error)


def _enable_when_needed() -> None:
    try:
        # It imports Dynamo, which ``import torch`` alone does not.
        from dynamo_dist.torch_compat.dynamo_compiler import before_first_compile

        before_first_compile(_enable)
    except Exception as error:
        log.warning("DYNAMO_DIST_INDUCTOR is set, but the plugin cannot be enabled: %s", error)


def _enable() -> None:
    # At the first compile only, so that ``import torch`` stays fast.
    from dynamo_dist.activation import enable

    enable()


def log_names_are_in_time(internal: ModuleType) -> bool:
    """Return whether TORCH_LOGS is still unread, seen by the handler that torch gives its logger
    then.
    """
    return not any(internal._is_torch_handler(h) for h in logging.getLogger("torch").handlers)
