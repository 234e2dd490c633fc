"""The graph around each pass, for ``TORCH_LOGS=dist_passes``: numbered, as a diff of one line a node.

``DYNAMO_DIST_PASS_FOLDER=folder`` writes the same to files: ``folder/rank0/GRAPH/00_program.txt``, and for each
pass that changed the graph ``NN_pass.txt``, the graph after it, and ``NN_pass.diff``.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from pathlib import Path

import torch.distributed as dist
from torch import fx

from inductor_passes.graph.printing import dump
from inductor_passes.records import PassRecord
from inductor_passes.torch_compat import logs

FOLDER = "DYNAMO_DIST_PASS_FOLDER"

log = logging.getLogger(__name__)


class PassLog:
    """What passes do to one graph, told pass by pass; silent, and free, where nobody asks."""

    def __init__(self, graph: fx.Graph, graph_id: str) -> None:
        self._log = logs.artifact_logger("inductor_passes.reporting.pass_log", "dist_passes")
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
    said = counts or ("" if record.changed else "nothing to do")
    return f"{record.name}: {record.reason or said or 'changed'} ({record.status}, {1e3 * record.seconds:.1f} ms)"


def _diff(before: str, after: str) -> list[str]:
    """Lines taken out (-) and put in (+); a node that moved is one of each."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]
