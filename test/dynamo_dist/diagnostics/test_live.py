"""The report that is kept up to date while a process compiles has breaks, recompiles and plans
too.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import dynamo_dist
from dynamo_dist.diagnostics import collector, read_report
from dynamo_dist.diagnostics import live as live_of_runs
from dynamo_dist.diagnostics.records import PlanRecord
from dynamo_dist.testing import fake_mesh
from inductor_passes.report import report as live
from inductor_passes.report import report as reporters

PLAN = PlanRecord("f00", "exact", 3, 9.0, 4.0, 4.0)


def split(x):
    y = funcol.all_reduce(x @ x, "sum", dist.group.WORLD)
    if y.sum() > 1e9:
        y = y + 1
    return y @ x


@pytest.fixture(autouse=True)
def nothing_seen_yet():
    live_of_runs.process_run.cache_clear()
    live_of_runs._with_graphs.cache_clear()


def test_a_break_before_the_first_graph_is_in_it(tmp_path, without_kernels):
    with fake_mesh(4), dynamo_dist.enabled():
        collector.publish_plan(PLAN)
        compiled = torch.compile(split, backend="dynamo_dist", options={"report": str(tmp_path)})
        compiled(torch.ones(4, 4))
    report = read_report(tmp_path / "report.rank0.json")
    assert [b.kind for b in report.breaks if __file__ in b.user_line] == [
        "Data-dependent branching"
    ]
    assert PLAN in report.plans
    assert len(report.graphs) == 1


def test_while_disabled_a_report_has_graphs_alone():
    assert reporters._own is live.live_graphs
    with dynamo_dist.enabled():
        assert reporters._own is not live.live_graphs
    assert reporters._own is live.live_graphs
