"""Graph breaks and plans for ``TORCH_LOGS`` (``dist_breaks``, ``dist_plan``) and for tlparse."""

from __future__ import annotations

import dataclasses
import json

from dynamo_dist.reporting.records import BreakRecord, Part, PlanRecord
from inductor_passes.torch_compat.dynamo import artifact_logger, trace_artifact

# Artifact -> the module under whose name its lines come.
MODULES = {"dist_breaks": "dynamo_dist.reporting", "dist_plan": "dynamo_dist.planning"}


def log_decision(record: Part) -> None:
    """Log a break with its advice, each time it is met, or a plan."""
    if isinstance(record, BreakRecord):
        _log_break(record)
    elif isinstance(record, PlanRecord):
        _log_plan(record)


def _log_break(record: BreakRecord) -> None:
    lines = [f"{record.kind} ({record.effect}) at {record.user_line}", f"why: {record.explanation}"]
    if record.fix:
        lines += ["fix:", *(f"  {code}" for code in record.fix.splitlines())]
    _log("dist_breaks", lines, "dynamo_dist_graph_break", record)


def _log_plan(record: PlanRecord) -> None:
    """Log what the plan is worth, and a line for each operation whose inputs it puts elsewhere."""
    lines = [
        f"{record.graph}: {len(record.changes)} of {record.steps} steps changed by {record.method}, "
        f"{record.stock_us:.0f} -> {record.planned_us:.0f} us, bound {record.bound_us:.0f} us, modelled; {f'read from {record.source}' if record.source else 'made now'}"
    ]
    lines += [f"{c.op}: {', '.join(c.stock)} -> {', '.join(c.planned)}" for c in record.changes]
    _log("dist_plan", lines, "dynamo_dist_plan", record)


def _log(artifact: str, lines: list[str], name: str, record: BreakRecord | PlanRecord) -> None:
    artifact_logger(MODULES[artifact], artifact).info("%s", "\n  ".join(lines))
    trace_artifact(name, lambda: json.dumps(dataclasses.asdict(record)), "json")
