"""Small reports made by hand."""

import pytest

from dynamo_dist.reporting import BreakRecord, Fact, RecompileRecord, RunReport
from inductor_passes.records import (
    CollectiveRecord,
    FigureRecord,
    GraphRecord,
    PassRecord,
    SpanRecord,
    TimelineRecord,
)


def make_graph(**changes):
    """A gather that waits for nothing, then two matrix products: the second pass hides the gather."""
    before = TimelineRecord(
        spans=(
            SpanRecord("compute", "mm", "compute", 0.0, 100.0),
            SpanRecord("tp", "all_gather", "all_gather", 100.0, 80.0),
            SpanRecord("compute", "wait_all_gather", "wait", 100.0, 80.0),
            SpanRecord("compute", "mm_1", "compute", 180.0, 50.0),
        ),
        makespan_us=230.0,
        compute_us=150.0,
        communication_us=80.0,
        exposed_us=80.0,
        peak_bytes=3 << 20,
    )
    after = TimelineRecord(
        spans=(
            SpanRecord("tp", "all_gather", "all_gather", 0.0, 120.0),
            SpanRecord("compute", "mm", "compute", 0.0, 100.0),
            SpanRecord("compute", "wait_all_gather", "wait", 100.0, 20.0),
            SpanRecord("compute", "mm_1", "compute", 120.0, 50.0),
        ),
        makespan_us=170.0,
        compute_us=150.0,
        communication_us=120.0,
        exposed_us=20.0,
        peak_bytes=4 << 20,
    )
    fields = {
        "graph_id": "0/0:forward",
        "phase": "forward",
        "node_count": 5,
        "topology": "h100x8",
        "passes": (
            PassRecord("hoist_launches", "bitwise", "ran", True, {"launches_hoisted": 1}, 0.002),
            PassRecord("sink_waits", "bitwise", "ran", False, {"waits_sunk": 0}, 0.001),
            PassRecord("fuse", "reassociating", "skipped", False, {}, 0.0, "triton is missing"),
        ),
        "collectives": (
            CollectiveRecord(
                name="all_gather",
                kind="all_gather",
                group_name="tp",
                group_size=8,
                payload_bytes=1 << 20,
                dtype="bfloat16",
                reduce_op=None,
                stack="/src/model.py:12: w = self.weight.full_tensor()",
                predicted_us=80.0,
                exposed_before_us=80.0,
                exposed_after_us=20.0,
            ),
        ),
        "before": before,
        "after": after,
        "order": ("launch all_gather tp", "kernel", "wait 0", "kernel"),
        "order_kept": True,
        "warnings": ("fuse failed and was left out",),
        "figures": (FigureRecord("busiest group's link", 80.0, "us"),),
    }
    return GraphRecord(**{**fields, **changes})


def make_report(**changes):
    fields = {
        "rank": 1,
        "world_size": 8,
        "torch_version": "2.13.0",
        "plugin_version": "0.1.0",
        "topology": "h100x8",
        "graphs": (make_graph(),),
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
def graph():
    return make_graph


@pytest.fixture
def report():
    return make_report
