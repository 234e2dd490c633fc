"""Reports of runs written to disk, and the traces of all their ranks as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dynamo_dist.reporting.merge import MergedReport
from dynamo_dist.reporting.records import RunReport
from dynamo_dist.reporting.render_html import render_html
from inductor_passes.report import report as of_graphs
from inductor_passes.simulate import joined_traces


def write_report(
    report: RunReport | MergedReport, directory: str | os.PathLike[str]
) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json`` and ``trace.json``; the paths written.

    Names carry the rank (``report.rank3.html``) where the run has several and ``report`` is one
    rank's. If the folder cannot be written, warns and returns ().
    """
    return of_graphs.write_graphs(report, directory, render_html, trace)


def trace(report: RunReport | MergedReport) -> dict[str, Any]:
    """The timelines of all graphs, before and after, as one Chrome trace; of every rank there is."""
    if isinstance(report, MergedReport):
        return joined_traces([of_graphs.trace(of_rank) for of_rank in report.reports])
    return of_graphs.trace(report)
