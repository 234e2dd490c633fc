"""The report on one process's graphs: its data, its files, and the folder of
``options={"report": DIR}``.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import inductor_passes
from inductor_passes.files import JsonObject
from inductor_passes.records import GraphRecord
from inductor_passes.report import recorder
from inductor_passes.report.figures import GraphsReport, titled
from inductor_passes.report.render_html import page
from inductor_passes.simulate import chrome_trace

log = logging.getLogger(__name__)


def trace(report: GraphsReport) -> JsonObject:
    """The timelines of all graphs, before and after, as one Chrome trace."""
    timelines = {}
    for title, graph in titled(report.graphs):
        timelines[f"{title}, before"] = graph.before
        timelines[f"{title}, after"] = graph.after
    return chrome_trace(timelines, rank=report.rank)


def write_graphs(
    report: Any,
    directory: str | os.PathLike[str],
    html: Callable[[Any], str] = page,
    timelines: Callable[[Any], JsonObject] = trace,
) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json`` and ``trace.json``; the paths written.

    Names carry the rank (``report.rank3.html``) where the run has several and ``report`` is one
    rank's. Makes the folder. Each file is replaced at once, so a reader never sees half of one. If
    the folder cannot be written, warns and returns (). ``html`` and ``timelines`` make what a
    report that is more than one rank's graphs shows.
    """
    infix = ""
    if isinstance(report, GraphsReport) and report.world_size > 1:
        infix = f".rank{report.rank}"
    contents = {
        f"report{infix}.html": html(report),
        f"report{infix}.json": json.dumps(report.to_json(), indent=1),
        f"trace{infix}.json": json.dumps(timelines(report)),
    }
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _replace_all(folder, contents)
    except OSError as error:
        log.warning(
            "No report was written to %s (%s). The compile goes on and loses nothing but the "
            "report. Give a folder that this process may write, with room for a few megabytes.",
            folder,
            error,
        )
        return ()


def _replace_all(folder: Path, contents: dict[str, str]) -> tuple[Path, ...]:
    """Write every file beside its place first, so that a full disk leaves the old ones whole."""
    temporary: dict[Path, Path] = {}
    try:
        for name, text in contents.items():
            handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            temporary[folder / name] = Path(unfinished)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp's files are for their owner alone; a report is as readable as any new file.
            os.chmod(unfinished, 0o666 & ~_umask())
        for path, unfinished_path in temporary.items():
            unfinished_path.replace(path)
        return tuple(temporary)
    finally:
        for left in temporary.values():
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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
        """Write what came after the last refresh. The process group may be gone: its rank is
        kept.
        """
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


# Takes the folder of option ``report``, starts to listen, and returns what brings the folder up to
# date; that is called after each graph, once its record is published.
Reporter = Callable[[str], Callable[[], object]]

_own: Reporter = live_graphs
_open: dict[str, Callable[[], object]] = {}


def use(reporter: Reporter) -> Reporter:
    """Write reports that are begun from now on by ``reporter``, which knows more of a run;
    returns the one before.
    """
    global _own
    before, _own = _own, reporter
    return before


def start(directory: str | None) -> None:
    """Let the reporter listen from now on for the report in ``directory``; once for each folder."""
    if directory is None:
        return
    folder = os.path.abspath(directory)
    if folder not in _open:
        _open[folder] = _own(folder)


def write(directory: str | None) -> None:
    """Bring the report in ``directory`` up to date. Whatever goes wrong costs a warning, no
    compile.
    """
    if directory is None:
        return
    start(directory)
    folder = os.path.abspath(directory)
    try:
        _open[folder]()
    except Exception as error:
        log.warning(
            "The report in %s could not be written (%s: %s); the compile goes on.",
            folder,
            type(error).__name__,
            error,
        )
