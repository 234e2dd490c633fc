"""Log decisions, passes and cache misses for ``TORCH_LOGS`` and tlparse.

``TORCH_LOGS=dist_schedule,dist_collectives,dist_fuse`` where torch knows these names (from 2.13 on,
with the package installed), and the modules' names everywhere: ``+inductor_passes.schedule`` and so
on.

``INDUCTOR_PASSES_PASS_FOLDER=folder`` writes the same to files:
``folder/rank0/GRAPH/00_program.txt``, and for each pass that changed the graph ``NN_pass.txt``, the
graph after it, and ``NN_pass.diff``.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import fx

from inductor_passes.graph.printing import dump
from inductor_passes.records import GraphRecord, PassRecord
from inductor_passes.torch_compat import dynamo
from inductor_passes.torch_compat.dynamo import artifact_logger, trace_artifact

if TYPE_CHECKING:
    from inductor_passes.extension import Extension

FOLDER = "INDUCTOR_PASSES_PASS_FOLDER"

log = logging.getLogger(__name__)


class PassLog:
    """Log what each pass does to one graph. It is silent and free unless a user asks for it."""

    def __init__(self, graph: fx.Graph, graph_id: str) -> None:
        self._log = dynamo.artifact_logger("inductor_passes.report.logs", "dist_passes")
        self._folder = _folder(graph_id)
        self._wanted = self._folder is not None or self._log.isEnabledFor(logging.DEBUG)
        self._graph, self._graph_id = graph, graph_id
        self._number = 0
        if self._wanted:
            self._before = dump(graph)
            self._write("program.txt", self._before)

    def after(self, record: PassRecord) -> None:
        """Tell what the pass of ``record``, the last that ran, did to the graph."""
        if not self._wanted:
            return
        self._number += 1
        now = dump(self._graph) if record.changed else self._before
        difference = _diff(self._before, now)
        self._before = now
        if difference:
            self._write(f"{record.name}.txt", now)
            self._write(f"{record.name}.diff", "\n".join(difference))
        for line in (_summary(record), *record.notes, *difference):
            self._log.debug("%s: %02d %s", self._graph_id, self._number, line)

    def _write(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        path = self._folder / f"{self._number:02d}_{name}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        except OSError as error:
            log.warning("%s could not be written (%s). Set %s to a folder.", path, error, FOLDER)
            self._folder = None


def _folder(graph_id: str) -> Path | None:
    root = os.environ.get(FOLDER)
    if not root:
        return None
    name = re.sub(r"[^\w.-]+", "_", graph_id) or "graph"
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Path(root) / f"rank{rank}" / name


def _summary(record: PassRecord) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in record.counters.items() if count)
    note = counts or ("" if record.changed else "nothing to do")
    return (
        f"{record.name}: {record.reason or note or 'changed'} ({record.status}, "
        f"{1e3 * record.seconds:.1f} ms)"
    )


def _diff(before: str, after: str) -> list[str]:
    """Lines taken out (-) and put in (+); a node that moved is one of each."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


# Those of the core.
MODULES = {
    "dist_collectives": "inductor_passes.report.describe",
    "dist_passes": "inductor_passes.report.logs",
    "dist_schedule": "inductor_passes.schedule",
}


def modules() -> dict[str, str]:
    """Artifact -> the module under whose name its lines come; of extensions the package."""
    return MODULES | {e.log_artifact: type(e).__module__.rpartition(".")[0] for e in _extensions()}


def _extensions() -> list[Extension]:
    """Extensions that log."""
    # It loads all passes; reports are loaded without.
    from inductor_passes import registry

    return [each for each in registry.extensions() if each.log_artifact]


_KEPT = {True: "order kept", False: "order NOT kept", None: "order not read"}


def log_graph(record: GraphRecord) -> None:
    """Log a graph that was compiled, or came from a cache."""
    package = modules()
    for artifact, lines in (
        ("dist_schedule", _schedule),
        ("dist_collectives", _collectives),
        *((each.log_artifact, each.log_lines) for each in _extensions()),
        ("dist_passes", _cache),
    ):
        log = artifact_logger(package[artifact], artifact)
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
        f"{s.makespan_before_us:.0f} -> {s.makespan_after_us:.0f} us, bound {s.bound_us:.0f} us, "
        f"gap {100 * s.gap:.1f}%, peak {s.peak_before_bytes / 2**20:.1f} -> "
        f"{s.peak_after_bytes / 2**20:.1f} MiB, {s.seconds:.2f} s, {_KEPT[record.order_kept]}, "
        f"{s.decision}"
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
