"""Log breaks, recompiles, plans and changes of placement while the plugin is on.

Graph breaks happen before a backend is first called, so they are listened for from ``enable()`` on.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynamo_dist.diagnostics import collector
from dynamo_dist.diagnostics.collector import Collector
from dynamo_dist.diagnostics.records import BreakRecord, Part, PlanRecord
from dynamo_dist.diagnostics.render import write_report
from dynamo_dist.torch_compat import dtensor_placements
from dynamo_dist.torch_compat.dynamo_frames import PLACES, watch_dynamo
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.graph.printing import CAUSE
from inductor_passes.report import recorder, report
from inductor_passes.report.report import LiveReport
from inductor_passes.torch_compat.dynamo import artifact_logger, trace_artifact

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def patches() -> list[Patch]:
    """List the patches that enabling makes, so that a cached graph's record has the cause too."""
    return [*dtensor_placements.redistribute_changes(change_of_placement, CAUSE)]


def change_of_placement(current: Any, target: Any, op: str) -> str:
    """``Shard(0) -> Replicate() on tp, for aten.mm.default``: each mesh dimension that changes."""
    mesh = current.mesh
    names = mesh.mesh_dim_names or [f"mesh dim {i}" for i in range(mesh.ndim)]
    parts = [
        f"{_placement_text(old)} -> {_placement_text(new)} on {name}"
        for name, old, new in zip(names, current.placements, target.placements, strict=True)
        if old != new
    ]
    return ", ".join(parts) + (f", for {op}" if op else "")


def _placement_text(placement: Placement) -> str:
    return repr(placement).replace("dim=", "")


# Artifact -> the module under whose name its lines come.
MODULES = {"dist_breaks": "dynamo_dist.diagnostics", "dist_plan": "dynamo_dist.planning"}


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
        f"{record.graph}: {len(record.changes)} of {record.steps} steps changed by "
        f"{record.method}, "
        f"{record.upstream_us:.0f} -> {record.planned_us:.0f} us, bound {record.bound_us:.0f} us, "
        f"modelled; {f'read from {record.source}' if record.source else 'made now'}"
    ]
    lines += [f"{c.op}: {', '.join(c.upstream)} -> {', '.join(c.planned)}" for c in record.changes]
    _log("dist_plan", lines, "dynamo_dist_plan", record)


def _log(artifact: str, lines: list[str], name: str, record: BreakRecord | PlanRecord) -> None:
    artifact_logger(MODULES[artifact], artifact).info("%s", "\n  ".join(lines))
    trace_artifact(name, lambda: json.dumps(dataclasses.asdict(record)), "json")


@functools.cache
def process_run() -> Collector:
    """What this process has met while enabled, and its graphs since a report was first asked
    for.
    """
    return Collector(on_change=log_decision)


@functools.cache
def _with_graphs() -> Collector:
    collector = process_run()
    recorder.subscribe(collector.take)
    return collector


def live_report(directory: str) -> Callable[[], object]:
    """Start to listen; the function returned brings ``directory`` up to date."""
    return LiveReport(directory, _with_graphs().report, write_report).refresh


class Listen:
    """A change of the plugin's switch: breaks, recompiles and plans are seen while enabled."""

    name = "listening"
    of = PLACES

    def apply(self) -> None:
        self._listening = contextlib.ExitStack()
        seen = process_run()
        self._listening.enter_context(watch_dynamo(seen.on_break, seen.on_compile))
        self._listening.callback(collector.subscribe_to_plans(seen.take))
        self._listening.callback(report.use, report.use(live_report))
        atexit.register(self._listening.close)  # while there still is something to close it with

    def undo(self) -> None:
        atexit.unregister(self._listening.close)
        self._listening.close()
