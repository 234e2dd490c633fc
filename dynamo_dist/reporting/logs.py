"""Graph breaks and plans for ``TORCH_LOGS`` (``dist_breaks``, ``dist_plan``) and for tlparse."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os

from dynamo_dist.reporting import plans
from dynamo_dist.reporting.collect import Collector, Seen
from dynamo_dist.reporting.records import BreakRecord, PlanRecord
from dynamo_dist.torch_compat.dynamo import watching as watching_compat
from inductor_passes.torch_compat.logs import artifact_logger, trace_artifact

# Artifact -> the module under whose name its lines come.
MODULES = {"dist_breaks": "dynamo_dist.reporting", "dist_plan": "dynamo_dist.sharding.plan"}


class LogDecisions:
    """A change of the plugin's switch: listens while enabled, if a log or a trace is asked for."""

    name = "logs"

    def apply(self) -> None:
        self._listening = contextlib.ExitStack()
        if _wanted("dist_breaks"):
            collector = Collector(on_change=_log_break)
            watching = watching_compat.watch_dynamo(collector.on_break, collector.on_compile)
            self._listening.enter_context(watching)
        if _wanted("dist_plan"):
            self._listening.callback(plans.subscribe(_log_plan))
        atexit.register(self._listening.close)  # while there still is something to close it with

    def undo(self) -> None:
        atexit.unregister(self._listening.close)
        self._listening.close()


def _wanted(artifact: str) -> bool:
    return "TORCH_TRACE" in os.environ or _logger(artifact).isEnabledFor(logging.INFO)


def _logger(artifact: str) -> logging.Logger:
    return artifact_logger(MODULES[artifact], artifact)


def _log_break(record: Seen) -> None:
    """The break with its advice, each time it is met."""
    if not isinstance(record, BreakRecord):
        return
    lines = [f"{record.kind} ({record.effect}) at {record.user_line}", f"why: {record.explanation}"]
    if record.fix:
        lines += ["fix:", *(f"  {code}" for code in record.fix.splitlines())]
    _logger("dist_breaks").info("%s", "\n  ".join(lines))
    text = json.dumps(dataclasses.asdict(record))
    trace_artifact("dynamo_dist_graph_break", lambda: text, "json")


def _log_plan(record: PlanRecord) -> None:
    """Log what the plan is worth, and a line for each operation whose inputs it puts elsewhere."""
    lines = [
        f"{record.graph}: {len(record.changes)} of {record.steps} steps changed by {record.method}, "
        f"{record.stock_us:.0f} -> {record.planned_us:.0f} us, bound {record.bound_us:.0f} us, modelled"
    ]
    lines += [f"{c.op}: {', '.join(c.stock)} -> {', '.join(c.planned)}" for c in record.changes]
    _logger("dist_plan").info("%s", "\n  ".join(lines))
    text = json.dumps(dataclasses.asdict(record))
    trace_artifact("dynamo_dist_plan", lambda: text, "json")
