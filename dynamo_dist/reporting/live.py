"""The report of ``options={"report": DIR}``: kept up to date while the process compiles.

Graph breaks happen before a backend is first called, so a process-wide collector listens from
``enable()`` on; for those who keep stock trackers, from ``inductor_passes.options(report=...)`` on.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
from collections.abc import Callable

from dynamo_dist.reporting.collect import Collector, collect
from dynamo_dist.reporting.records import RunReport
from dynamo_dist.reporting.write import write_report

EVERY_GRAPH = 8

_lock = threading.Lock()
_listening = contextlib.ExitStack()
_collector: Collector | None = None


def listen() -> Collector:
    """The process-wide collector, started if it is not on."""
    global _collector  # noqa: PLW0603 - one for the process
    with _lock:
        if _collector is None:
            _collector = _listening.enter_context(collect())
            atexit.register(stop)  # last in, first out: after what finishes the reports
        return _collector


def stop() -> None:
    """Stop listening and forget; a report that is written later starts anew."""
    global _collector  # noqa: PLW0603
    with _lock:
        _collector = None
        _listening.close()
        atexit.unregister(stop)


def live_report(directory: str) -> Callable[[], object]:
    """Start to listen; the function returned brings ``directory`` up to date.

    A report is written whole each time, so with many graphs not after each of them: up to
    ``EVERY_GRAPH`` graphs, then whenever a quarter more are there, and what is left at exit.
    """
    folder = _Folder(directory)
    atexit.register(folder.finish)
    return folder.refresh


class _Folder:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.collector = listen()
        self.written: RunReport | None = None

    def refresh(self) -> None:
        self.collector = listen()
        report = self.collector.report()
        known = len(self.written.graphs) if self.written else 0
        if not EVERY_GRAPH < len(report.graphs) < known * 1.25:
            self._write(report)

    def finish(self) -> None:
        """Write what came after the last refresh. The process group may be gone: its rank is kept."""
        if self.written is None:
            return
        rank, world_size = self.written.rank, self.written.world_size
        report = dataclasses.replace(self.collector.report(), rank=rank, world_size=world_size)
        if report != self.written:
            self._write(report)

    def _write(self, report: RunReport) -> None:
        self.written = report
        write_report(report, self.directory)
