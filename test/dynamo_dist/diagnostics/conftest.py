"""Small reports made by hand."""

import functools

import pytest

from dynamo_dist.diagnostics import BreakRecord, Fact, RecompileRecord, RunReport


def make_report(graph, **changes):
    fields = {
        "rank": 1,
        "world_size": 8,
        "torch_version": "2.13.0",
        "plugin_version": "0.1.0",
        "topology": "h100x8",
        "graphs": (graph(),),
        "breaks": (
            BreakRecord(
                kind="Data-dependent branching",
                reason="Detected data-dependent branching.",
                user_line="/src/model.py:30: if x.sum() > 0:",
                explanation="The branch depends on data.",
                fix="y = torch.where(x > 0, a, b)",
                cause="data_dependent_branch",
                effect="split",
                count=2,
                hints=("Use torch.cond.",),
            ),
        ),
        "recompiles": (RecompileRecord("forward", "/src/model.py:7", "n == 3", 2),),
        "facts": (
            Fact("step, ours", 12.25, "ms", "measured, CPU"),
            Fact("loss", (5.5, 4.0, 2.25), "", "measured"),
            Fact("note", "two ranks"),
        ),
    }
    return RunReport(**{**fields, **changes})


@pytest.fixture
def report(graph):
    return functools.partial(make_report, graph)
