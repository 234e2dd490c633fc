"""Reports written to disk: whole files or none, and a folder that cannot be written never stops a compile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from dynamo_dist.reporting.merge import MergedReport
from dynamo_dist.reporting.records import RunReport
from dynamo_dist.reporting.render_html import render_html
from dynamo_dist.reporting.summary import graph_titles
from inductor_passes.simulate import chrome_trace, joined_traces

log = logging.getLogger(__name__)


def write_report(
    report: RunReport | MergedReport, directory: str | os.PathLike[str]
) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json`` and ``trace.json``; the paths written.

    Names carry the rank (``report.rank3.html``) where the run has several and ``report`` is one
    rank's. Makes the folder. Each file is replaced at once, so a reader never sees half of one. If
    the folder cannot be written, warns and returns ().
    """
    infix = ""
    if isinstance(report, RunReport) and report.world_size > 1:
        infix = f".rank{report.rank}"
    contents = {
        f"report{infix}.html": render_html(report),
        f"report{infix}.json": json.dumps(report.to_json(), indent=1),
        f"trace{infix}.json": json.dumps(trace(report)),
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


def trace(report: RunReport | MergedReport) -> dict[str, Any]:
    """The timelines of all graphs, before and after, as one Chrome trace; of every rank there is."""
    if isinstance(report, MergedReport):
        return joined_traces([trace(of_rank) for of_rank in report.reports])
    timelines = {}
    for title, graph in zip(graph_titles(report.graphs), report.graphs, strict=True):
        timelines[f"{title}, before"] = graph.before
        timelines[f"{title}, after"] = graph.after
    return chrome_trace(timelines, rank=report.rank)


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
