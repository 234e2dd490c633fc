"""A report of a run as one HTML file: the page of its graphs, and breaks, plans and ranks in it."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_dist.reporting.merge import MergedReport
from dynamo_dist.reporting.records import RunReport
from dynamo_dist.reporting.summary import (
    EFFECTS,
    ONLY_OBSERVED,
    WHY_RANKS_ARE_MISSING,
    is_only_observed,
    why_no_graph,
)
from inductor_passes.report.figures import rank_list
from inductor_passes.report.render_html import page


def render_html(report: RunReport | MergedReport) -> str:
    """The whole page. A merged report shows where ranks differ, then the lowest rank's graphs."""
    merged = report if isinstance(report, MergedReport) else None
    run = report.first if isinstance(report, MergedReport) else report
    return page(
        run,
        "report.html.j2",
        __package__,
        merged=merged,
        why_no_graph=why_no_graph(run),
        only_observed=ONLY_OBSERVED if is_only_observed(run) else "",
        why_ranks_are_missing=WHY_RANKS_ARE_MISSING,
        effects=EFFECTS,
        rank_list=rank_list,
        sparkline=_sparkline,
    )


def _sparkline(values: Sequence[float], width: int = 120, height: int = 24) -> str:
    """Points of a polyline through ``values``, scaled to the box; numbers only."""
    finite = [v for v in values if abs(v) != float("inf") and v == v]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    spread = (high - low) or 1.0
    return " ".join(
        f"{i * width / (len(finite) - 1):.1f},{height - 2 - (v - low) / spread * (height - 4):.1f}"
        for i, v in enumerate(finite)
    )
