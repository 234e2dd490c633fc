"""Reports written to disk: whole files or none, and a folder that cannot be written never stops a compile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inductor_passes.reporting.render_html import page
from inductor_passes.reporting.report import GraphsReport
from inductor_passes.reporting.summary import titled
from inductor_passes.simulate import chrome_trace

log = logging.getLogger(__name__)


def trace(report: GraphsReport) -> dict[str, Any]:
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
    timelines: Callable[[Any], dict[str, Any]] = trace,
) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json`` and ``trace.json``; the paths written.

    Names carry the rank (``report.rank3.html``) where the run has several and ``report`` is one
    rank's. Makes the folder. Each file is replaced at once, so a reader never sees half of one. If
    the folder cannot be written, warns and returns (). ``html`` and ``timelines`` make what a report
    that is more than one rank's graphs shows.
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
            "No report was written to %s (%s). The compile goes on and loses nothing but the report. "
            "Give a folder that this process may write, with room for a few megabytes.",
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
