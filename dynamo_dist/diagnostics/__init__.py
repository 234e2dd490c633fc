"""From records of breaks, recompiles and graphs to text, JSON, HTML and a trace."""

from dynamo_dist.diagnostics.collector import Collector, collect, explain
from dynamo_dist.diagnostics.merge import MergedReport, RankDifference, merge_ranks
from dynamo_dist.diagnostics.records import (
    BreakRecord,
    Fact,
    RecompileRecord,
    RunReport,
    read_report,
)
from dynamo_dist.diagnostics.render import render_html, render_text, write_report

__all__ = [
    "BreakRecord",
    "Collector",
    "Fact",
    "MergedReport",
    "RankDifference",
    "RecompileRecord",
    "RunReport",
    "collect",
    "explain",
    "merge_ranks",
    "read_report",
    "render_html",
    "render_text",
    "write_report",
]
