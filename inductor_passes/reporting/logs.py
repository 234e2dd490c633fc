"""Logs of the decisions on each graph, for ``TORCH_LOGS`` and for tlparse; on a warm cache too.

``TORCH_LOGS=dist_schedule,dist_collectives,dist_fuse`` where torch knows these names (from 2.13 on, with
the package installed), and the modules' names everywhere: ``+inductor_passes.schedule`` and so on.
"""

from __future__ import annotations

import json
import logging

from inductor_passes.fuse import FUSIONS
from inductor_passes.records import GraphRecord
from inductor_passes.torch_compat.logs import artifact_logger, trace_artifact

# Artifact -> the module under whose name its lines come.
MODULES = {
    "dist_collectives": "inductor_passes.reporting.describe",
    "dist_fuse": "inductor_passes.fuse",
    "dist_passes": "inductor_passes.reporting.pass_log",
    "dist_schedule": "inductor_passes.schedule",
}
_KEPT = {True: "order kept", False: "order NOT kept", None: "order not read"}


def log_graph(record: GraphRecord) -> None:
    """Log a graph that was compiled, or came from a cache."""
    for artifact, lines in (
        ("dist_schedule", _schedule),
        ("dist_collectives", _collectives),
        ("dist_fuse", _fusions),
        ("dist_passes", _cache),
    ):
        log = artifact_logger(MODULES[artifact], artifact)
        if log.isEnabledFor(logging.INFO):
            for line in lines(record):
                log.info("%s: %s", record.graph_id, line)
    trace_artifact(
        f"inductor_passes_{record.phase}_report", lambda: json.dumps(record.to_json()), "json"
    )


def _cache(record: GraphRecord) -> list[str]:
    """Whether the passes' work came from a cache, and if not, why."""
    return [] if record.cache is None else [f"cache {record.cache}"]


def _schedule(record: GraphRecord) -> list[str]:
    """One line; none where the global scheduler did not run."""
    s = record.schedule
    if s is None:
        return []
    return [
        f"{s.nodes} nodes, {s.launches} launches, {s.buckets} buckets, makespan "
        f"{s.makespan_before_us:.0f} -> {s.makespan_after_us:.0f} us, bound {s.bound_us:.0f} us, gap "
        f"{100 * s.gap:.1f}%, peak {s.peak_before_bytes / 2**20:.1f} -> "
        f"{s.peak_after_bytes / 2**20:.1f} MiB, {s.seconds:.2f} s, {_KEPT[record.order_kept]}, {s.decision}"
    ]


def _collectives(record: GraphRecord) -> list[str]:
    """A line for each launch: what, why there, predicted and exposed time, the user's line."""
    lines = []
    for c in record.collectives:
        why = f" ({c.why_exposed})" if c.why_exposed else ""
        parts = (
            f"{c.kind} of {c.payload_bytes} bytes on {c.group_name}, {c.group_size} ranks",
            c.cause,
            f"predicted {c.predicted_us:.0f} us, exposed {c.exposed_before_us:.0f} -> "
            f"{c.exposed_after_us:.0f} us{why}",
            c.stack,
        )
        lines.append("; ".join(part for part in parts if part))
    return lines


def _fusions(record: GraphRecord) -> list[str]:
    """A line for each decision of a fusing pass, or why the pass did not run."""
    names = {pass_.name for pass_ in FUSIONS}
    return [
        f"{p.name}: {said}"
        for p in record.passes
        if p.name in names
        for said in (p.notes or ((p.reason,) if p.reason else ()))
    ]
