"""Reasons and advice of a whole run, in a reader's words."""

from __future__ import annotations

from dynamo_dist.reporting.records import RunReport

ONLY_OBSERVED = (
    'Stock Inductor compiled these graphs. What this plugin would do: compile with backend="dynamo_dist", '
    "or explain with --backend dynamo_dist."
)
WHY_RANKS_ARE_MISSING = (
    "Ranks of a fake group have no process, so none. Others: start all of them in the same way, and see "
    "whether they ended early."
)
EFFECTS = {
    "split": "splits the graph",
    "eager": "the rest runs eagerly",
    "error": "the compile failed",
}


def why_no_graph(report: RunReport) -> str:
    """Return the reason why a report has no graph; "" if it has one."""
    if report.graphs:
        return ""
    if not report.torch_version:
        return "No process of this run called torch.compile."
    if any(item.effect == "error" for item in report.breaks):
        return "No graph was compiled: see the failed compile."
    return (
        "No graph came to Inductor: what torch.compile returned was never called, computes nothing with "
        "tensors, or has another backend than inductor and dynamo_dist, whose graphs are recorded."
    )


def is_only_observed(report: RunReport) -> bool:
    """Return whether stock Inductor compiled all graphs: they were looked at, and before and after are one."""
    return bool(report.graphs) and not any(graph.passes for graph in report.graphs)
