"""The report of ``options={"report": DIR}``: kept up to date while the process compiles."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import inductor_passes
from inductor_passes.records import GraphRecord
from inductor_passes.reporting import recorder
from inductor_passes.reporting.report import GraphsReport
from inductor_passes.reporting.write import write_graphs

EVERY_GRAPH = 8
T = TypeVar("T")


class GraphCollector:
    """The graphs seen so far. Safe to read at any time, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[object, Any] = {}

    def of(self, kind: type[T]) -> list[T]:
        """Records of a kind: of each thing the latest that came, in first-seen order."""
        with self._lock:
            return [record for record in self._seen.values() if isinstance(record, kind)]

    @property
    def graphs(self) -> list[GraphRecord]:
        """One record for each graph."""
        return self.of(GraphRecord)

    def take(self, record: Any) -> None:
        """Take a record; a later one of the same ``key`` replaces the earlier."""
        with self._lock:
            self._seen[type(record), record.key] = record

    def report(self) -> GraphsReport:
        """Everything seen so far with this process's rank and versions."""
        graphs = tuple(self.graphs)
        spread = dist.is_available() and dist.is_initialized()
        return GraphsReport(
            rank=dist.get_rank() if spread else 0,
            world_size=dist.get_world_size() if spread else 1,
            torch_version=torch.__version__,
            plugin_version=inductor_passes.__version__,
            topology=", ".join(dict.fromkeys(g.topology for g in graphs if g.topology)),
            graphs=graphs,
        )


class LiveReport:
    """The report in one folder: what ``report`` returns, as ``write`` writes it.

    A report is written whole each time, so with many graphs not after each of them: up to
    ``EVERY_GRAPH`` graphs, then whenever a quarter more are there, and what is left at exit.
    """

    def __init__(
        self,
        directory: str,
        report: Callable[[], GraphsReport],
        write: Callable[[Any, str], object],
    ) -> None:
        self._directory, self._report, self._write_to = directory, report, write
        self._written: GraphsReport | None = None
        atexit.register(self.finish)

    def refresh(self) -> None:
        """Bring the folder up to date."""
        report = self._report()
        known = len(self._written.graphs) if self._written else 0
        if not EVERY_GRAPH < len(report.graphs) < known * 1.25:
            self._write(report)

    def finish(self) -> None:
        """Write what came after the last refresh. The process group may be gone: its rank is kept."""
        if self._written is None:
            return
        rank, world_size = self._written.rank, self._written.world_size
        report = dataclasses.replace(self._report(), rank=rank, world_size=world_size)
        if report != self._written:
            self._write(report)

    def _write(self, report: GraphsReport) -> None:
        self._written = report
        self._write_to(report, self._directory)


@functools.cache
def process_graphs() -> GraphCollector:
    """The graphs that this process has compiled since this was first asked for."""
    collector = GraphCollector()
    recorder.subscribe(collector.take)
    return collector


def live_graphs(directory: str) -> Callable[[], object]:
    """Start to listen; the function returned brings ``directory`` up to date."""
    return LiveReport(directory, process_graphs().report, write_graphs).refresh
