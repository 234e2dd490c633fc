"""From records of breaks, recompiles and graphs to text, JSON, HTML and a trace."""

from dynamo_dist.reporting.collect import Collector, collect, explain
from dynamo_dist.reporting.merge import MergedReport, RankDifference, merge_ranks
from dynamo_dist.reporting.read import read_report
from dynamo_dist.reporting.records import BreakRecord, Fact, RecompileRecord, RunReport
from dynamo_dist.reporting.render_html import render_html
from dynamo_dist.reporting.render_text import render_text
from dynamo_dist.reporting.write import write_report

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
