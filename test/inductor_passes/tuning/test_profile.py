"""Profiles of a device that is made up: what of its kernels is which launch, stretch of compute and node."""

import itertools
import json
import runpy
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from inductor_passes.attach import clocked as clocked_module
from inductor_passes.attach.clocked import clocked
from inductor_passes.attach.marks import ProfiledMarks
from inductor_passes.errors import TopologyError
from inductor_passes.machine.importing.kineto_calls import calls
from inductor_passes.machine.times.times import LaunchTime
from inductor_passes.records import NodeRecord
from inductor_passes.tuning.layout import layout_of
from inductor_passes.tuning.merge import RankCalls, computed_us, graph_times
from inductor_passes.tuning.profile import UnreadCallError, marks_of, shares_of

made_up = runpy.run_path(str(Path(__file__).parents[2] / "made_up_device.py"))
COMPUTE, SOURCE, Device = made_up["COMPUTE"], made_up["SOURCE"], made_up["Device"]
NODES = (
    NodeRecord("mm", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
    NodeRecord("gather", "launch", "all_gather", 5.0, 0, hosts=1),
    NodeRecord("relu", "compute", "aten.relu.default", 3.0),
    NodeRecord("add", "compute", "aten.add.Tensor", 1.0),
    NodeRecord("exp", "compute", "aten.exp.default", 4.0),
    NodeRecord("wait", "wait", "wait", 0.0, 0),
    NodeRecord("mm_1", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
)
EVENTS = ("kernel", "launch all_gather", "wait 0", "kernel")
LAYOUT = layout_of(NODES, EVENTS)
US = {"mm": 30.0, "gather": 50.0, "fused": 8.0, "mm_1": 20.0}


@pytest.fixture
def profiled(monkeypatch):
    """``profiled(device, way)``: a call of the code on a device, as its profile shows it."""

    def run(device, way):
        module = device.module()
        monkeypatch.setattr(clocked_module, "_wait", device.wait_for)
        code = clocked(module.call, SOURCE)
        assert code.events == EVENTS
        device.start()
        code.start(way, opened=lambda: ProfiledMarks(3, len(EVENTS), device.range_of))
        module.call((1,))
        code.stop()
        return calls(device.stop(), "p")

    return run


def us_of(marks):
    """Microseconds of the stretch before each event and of the event, in turn, and behind the last."""
    return [pytest.approx(1e6 * (b - a), abs=1e-2) for a, b in itertools.pairwise(marks)]


def test_a_launch_that_is_waited_for_is_by_itself(profiled):
    (call,) = profiled(Device(US), "alone")
    assert (call.graph, call.events, len(call.kernels)) == (3, 4, 4)
    # Nothing before the product; it; nothing; the gather; the fused kernel; no wait any more; nothing; a product.
    assert us_of(marks_of(LAYOUT, call, alone=True)) == [0, 30, 0, 50, 8, 0, 0, 20, 0]


def test_a_launch_as_scheduled_shows_where_the_stream_stands_still(profiled):
    (call,) = profiled(Device(US), "scheduled")
    assert us_of(marks_of(LAYOUT, call, alone=False)) == [0, 30, 0, 0, 8, 42, 0, 20, 0]
    (hidden,) = profiled(Device({**US, "gather": 5.0}), "scheduled")
    assert us_of(marks_of(LAYOUT, hidden, alone=False)) == [0, 30, 0, 0, 8, 0, 0, 20, 0]


def test_time_that_the_stream_waits_for_the_host_is_compute_and_no_launch(profiled):
    (call,) = profiled(Device({**US, "mm": 1.0}, host_us=100.0), "alone")
    marks = marks_of(LAYOUT, call, alone=True)
    launch = 1e6 * (marks[4] - marks[3])
    assert launch == pytest.approx(75 + 50)  # from when the host began to start it
    assert computed_us(LAYOUT, marks) == pytest.approx(1e6 * (marks[-1] - marks[0]) - launch)


def test_fused_kernels_are_the_nodes_whose_names_they_bear(profiled):
    device = Device(US)
    device.fused = lambda *_: (
        Device.fused(device),
        device.kernel("triton_poi_fused_exp_1", COMPUTE, 6.0),
        device.kernel("Memcpy DtoD", COMPUTE, 4.0),
    )
    (call,) = profiled(device, "alone")
    found = shares_of(LAYOUT, call)
    # Of 8 us the predicted 3 to 1; of what bears no node's name, 3 to 1 to 4.
    assert found == pytest.approx({"relu": 6.0 + 1.5, "add": 2.0 + 0.5, "exp": 6.0 + 2.0})


def test_templates_of_products_are_products_by_their_order(profiled):
    nodes = [*NODES[:5], NodeRecord("mm_0", "kernel", "aten.mm.default", 9.0), *NODES[5:]]
    device = Device(US)
    device.fused = lambda *_: (
        Device.fused(device),
        device.kernel("triton_tem_fused_mm_3", COMPUTE, 11.0),
    )
    (call,) = profiled(device, "alone")
    found = shares_of(layout_of(nodes, EVENTS), call)
    assert found == pytest.approx({"relu": 6.0, "add": 2.0, "mm_0": 11.0})


def test_times_of_two_ranks_are_of_the_slower_one_and_of_the_last_to_come(record, profiled):
    slow, fast = Device({**US, "mm": 40.0}), Device(US)
    fast.peers = lambda: 1e6 + slow.host_us + 40.0
    of_ranks = {}
    for rank, device in enumerate((fast, slow)):
        (call,) = profiled(device, "alone")
        marks = marks_of(LAYOUT, call, alone=True)
        of_ranks[rank] = RankCalls((tuple(marks),), (), ((0, 1),), shares_of(LAYOUT, call))
    launched = [LaunchTime("all_gather", 2, 1, 256, 0.0, 0.0)]
    times = graph_times(record, LAYOUT, of_ranks, launched)
    assert times.launches["gather"].us == pytest.approx(50.0, abs=0.1)
    found = {name: node.us for name, node in times.nodes.items()}
    assert found == pytest.approx(
        {"mm": 40.0, "relu": 6.0, "add": 2.0, "exp": 0.0, "mm_1": 20.0}, abs=0.1
    )
    assert times.nodes["mm"].product == (1, 8, 8, 8)


@pytest.fixture
def record(graph):
    return graph(nodes=NODES)


def without(*words):
    return lambda events: [e for e in events if not any(word in e["name"] for word in words)]


def renamed(events):
    for event in events:
        if "Collective name" in event["args"]:
            event["args"]["Collective name"] = "allreduce"
    return events


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without("nccl"), r"launch 0 \(all_gather\) started no kernel of a collective"),
        (without("gemm"), r"product 0 started no kernel"),
        (without("event 1", "event 2"), r"2 of the 4 launches, waits and products"),
        (without("cudaLaunchKernel"), r"nothing that it ran on the device"),
        (renamed, r"launch 0 \(all_gather\) started a kernel of all_reduce"),
    ],
)
def test_what_cannot_be_told_apart_is_named_and_not_guessed(profiled, spoil, why):
    device = Device(US)
    device.spoil = spoil
    (call,) = profiled(device, "alone")
    with pytest.raises(UnreadCallError, match=why):
        marks_of(LAYOUT, call, alone=True)


def test_a_collective_without_a_name_is_what_ran_beside_the_stream_that_computes(profiled):
    device = Device(US)
    kernel = device.kernel
    device.kernel = lambda name, *rest, **args: (
        kernel("Memcpy DtoD", *rest) if "nccl" in name else kernel(name, *rest, **args)
    )
    (call,) = profiled(device, "alone")
    assert us_of(marks_of(LAYOUT, call, alone=True))[3] == 50


def test_several_kernels_of_one_product_are_one(profiled):
    device = Device(US)

    def mm(_, name):
        Device.mm(device, _, name)
        device.kernel("splitKreduce", COMPUTE, 5.0, **{"External id": device.count})

    device.mm = mm
    (call,) = profiled(device, "alone")
    assert [kernel.us for kernel in call.kernels if kernel.product] == [35.0, 25.0]
    assert us_of(marks_of(LAYOUT, call, alone=True))[1] == 35


def test_what_other_threads_start_meanwhile_is_not_the_calls(profiled):
    device = Device(US)

    def spoil(events):
        for event in events:
            if event["cat"] == "cuda_runtime" and event["args"]["correlation"] == 3:
                event["tid"] = 2
        return events

    device.spoil = spoil
    (call,) = profiled(device, "alone")
    assert [kernel.name for kernel in call.kernels][1:] == [
        "ncclDevKernel_AllGather",
        "sm80_xmma_gemm",
    ]


@pytest.mark.parametrize("bad", [{"dur": -1.0}, {"dur": float("nan")}, {"ts": "early"}])
def test_a_damaged_profile_is_refused(profiled, bad):
    device = Device(US)
    device.spoil = lambda events: [
        {**event, **bad} if event["cat"] == "kernel" else event for event in events
    ]
    with pytest.raises(TopologyError):
        profiled(device, "alone")


def test_ranges_are_those_that_the_real_profiler_writes(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as made:
        marks = ProfiledMarks(5, 2, record_function)
        for at in range(6):
            marks.append(float(at))
    made.export_chrome_trace(str(tmp_path / "p.json"))
    (call,) = calls(json.loads((tmp_path / "p.json").read_text()), "p")
    assert (call.graph, call.events, call.kernels) == (5, 2, ())
    assert list(marks) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
