"""``tune`` on CUDA ranks, of which a made-up device stands for device and profiler: no GPU is here."""

import functools
import json
import runpy
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import dynamo_dist
from dynamo_dist.tuning import by_itself, codes, profiled, session
from dynamo_dist.tuning.findings import Findings, evidence, findings
from inductor_passes.agree import orders
from inductor_passes.agree.orders import Orders
from inductor_passes.attach import clocked as clocked_module
from inductor_passes.attach import measured
from inductor_passes.records import CollectiveRecord, NodeRecord
from inductor_passes.torch_compat import c10d, caches

made_up = runpy.run_path(str(Path(__file__).parents[2] / "made_up_device.py"))
SOURCE, Device = made_up["SOURCE"], made_up["Device"]
US = {"mm": 3000.0, "gather": 5000.0, "fused": 800.0, "mm_1": 2000.0}
NODES = (
    NodeRecord("mm", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
    NodeRecord("gather", "launch", "all_gather", 5.0, 0, hosts=1),
    NodeRecord("relu", "compute", "aten.relu.default", 3.0),
    NodeRecord("add", "compute", "aten.add.Tensor", 1.0),
    NodeRecord("wait", "wait", "wait", 0.0, 0),
    NodeRecord("mm_1", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
)
GATHER = CollectiveRecord("gather", "all_gather", "0", 2, 256, "float32", None, "", 5.0, 0.0, 0.0)


class Made(codes.Noted):
    """A graph on CUDA whose record is at hand."""

    def __init__(self, device, record, runs="cuda"):
        self.device, self.module, self.of = device, device.module(), record
        super().__init__(weakref.ref(self.module), self.module.call, SOURCE, "abc", runs)

    def load(self):
        return self.of

    def step(self):
        self.device.steps += 1
        self.module.call((1,))


@pytest.fixture
def made(graph, monkeypatch):
    """``made(device)``: a graph of this process that runs on a device, which stands for the profiler too."""
    of_graph = functools.partial(
        graph, nodes=NODES, collectives=(GATHER,), graph="abc", place="here", machine="m"
    )
    monkeypatch.setattr(codes, "real_group_ranks", lambda _: (0, 1))

    def note(device, runs="cuda", **fields):
        found = Made(device, of_graph(**fields), runs)
        monkeypatch.setattr(codes, "_noted", [found])
        monkeypatch.setattr(clocked_module, "_wait", device.wait_for)
        monkeypatch.setattr(profiled, "Profiler", lambda: device)
        return found

    return note


@pytest.fixture(autouse=True)
def job(monkeypatch, tmp_path):
    found = Orders(dist.HashStore(), 0, None)
    monkeypatch.setattr(orders, "current", lambda: found)
    monkeypatch.setattr(c10d, "world_size", lambda: 1)
    monkeypatch.setattr(c10d, "global_rank", lambda: 0)
    monkeypatch.setattr(caches, "cache_dir", lambda: str(tmp_path))
    for module in (session, by_itself):
        monkeypatch.setattr(module, "is_enabled", lambda: True)
    measured.forget()
    yield found
    measured.forget()


@pytest.fixture
def tuned(made, monkeypatch):
    """``tuned(device)``: what ``tune`` reports, by the device's own clock."""

    def run(device, steps=6, **fields):
        found = made(device, **fields)
        clock = types.SimpleNamespace(perf_counter=lambda: device.now / 1e6)
        monkeypatch.setattr(session, "time", clock)
        before = found.module.call.__code__, set(vars(found.module))
        report = dynamo_dist.tune(found.step, steps=steps)
        assert (found.module.call.__code__, set(vars(found.module))) == before
        return report

    return run


def test_the_table_is_what_the_device_did(tuned):
    device = Device(US)
    report = tuned(device)
    assert report.decision == "tuned", report
    assert report.steps == 6 and report.left == () and not report.slow
    # The longer of gather and what stands beside it, between two products.
    assert report.before_us == pytest.approx(3000 + 5000 + 2000, rel=0.01)
    assert (report.compute_stretch, report.launch_stretch) == pytest.approx((1.0, 1.0), abs=0.01)
    (times,) = measured.adopted().values()
    (of_graph,) = times.graphs.values()
    assert of_graph.launches["gather"].us == pytest.approx(5000, rel=0.01)
    assert of_graph.waited_us == pytest.approx(4200, rel=0.01)
    found = {name: node.us for name, node in of_graph.nodes.items()}
    assert found == pytest.approx({"mm": 3000, "relu": 600, "add": 200, "mm_1": 2000}, rel=0.02)


def test_steps_on_the_wall_are_those_without_the_profiler(tuned):
    device = Device(US)
    on = []
    start, call = device.start, device.mm
    device.start = lambda: (setattr(device, "now", device.now + 9e6), start())
    device.mm = lambda x, name: (on.append(device.on) if name == "mm" else None, call(x, name))
    report = tuned(device, steps=6)
    assert report.before_us == pytest.approx(10000, rel=0.01)
    # One warms up, two of three are profiled; one would compile, then every other one is.
    assert on == [False, *[True, True, False] * 2, False, True, False, True]


def test_a_collective_that_slows_compute_is_seen(tuned):
    report = tuned(Device(US, beside=2.0))
    assert report.compute_stretch == pytest.approx(2.0, rel=0.02)
    assert report.launch_stretch == pytest.approx(1.0, rel=0.02)


def test_of_several_graphs_what_cannot_be_timed_is_in_the_report(tuned, graph, monkeypatch):
    other = Made(
        Device(US),
        graph(nodes=NODES, collectives=(GATHER,), graph="b", graph_id="1/0"),
        "cuda graph",
    )
    clocks = codes.Clocks
    monkeypatch.setattr(codes, "Clocks", lambda *how: codes._noted.append(other) or clocks(*how))
    report = tuned(Device(US))
    line = "graph 1/0 is not timed: a CUDA graph replays it, and its code does not run"
    assert report.decision == "tuned" and report.left == (line,)
    assert str(report).endswith(f"\n{line}")


@pytest.mark.parametrize("word", ["nccl", "gemm", "inductor_passes call"])
def test_what_a_profile_does_not_show_leaves_the_schedule_and_is_named(tuned, word):
    device = Device(US)
    device.spoil = lambda events: [e for e in events if word not in e["name"]]
    report = tuned(device)
    assert report.decision == "left" and not measured.adopted()
    said = {
        "nccl": "on rank 0 launch 0 (all_gather) started no kernel of a collective",
        "gemm": "on rank 0 product 0 started no kernel",
        "inductor_passes call": "on rank 0 the profile shows 0 of 1 calls",
    }[word]
    assert f"graph 0/0:forward is not timed: {said}" in report.why
    assert "\n" not in str(report)


def test_a_profiler_that_does_not_start_leaves_the_steps_to_run(tuned):
    device = Device(US)

    def start():
        raise RuntimeError("Profiler is already enabled on this thread\nand more")

    device.start, device.stop = start, lambda: None
    report = tuned(device)
    assert report.decision == "left" and device.steps == 1 + 6
    assert "torch.profiler failed: Profiler is already enabled on this thread" in report.why
    assert "and more" not in report.why


def test_a_profile_of_the_programs_own_stays_whole(made, monkeypatch):
    device = Device(US)
    real = profiled.Profiler()
    monkeypatch.setattr(real, "wait", device.wait)
    with profile(activities=[ProfilerActivity.CPU]) as own:
        with record_function("before"):
            pass
        found = made(device)
        clocks = codes.Clocks(real)
        clocks.start("alone")
        found.step()
        clocks.stop("alone")
        with record_function("after"):
            pass
    assert {"before", "after"} <= {each.key for each in own.key_averages()}
    assert clocks.calls()[0].why_not == "torch.profiler failed: the program's own profiler is on"


def test_the_real_profiler_where_no_device_is_shows_calls_without_kernels(made, monkeypatch):
    device = Device(US)
    real = profiled.Profiler()
    monkeypatch.setattr(real, "wait", device.wait)
    found = made(device)
    clocks = codes.Clocks(real)
    clocks.start("alone")
    found.step()
    clocks.stop("alone")
    assert clocks.calls()[0].why_not == "the profile shows nothing that it ran on the device"


class Here:
    """Clocks of a rank whose graphs are profiled, or not."""

    def __init__(self, *, is_profiling):
        self.is_profiling, self.ways = is_profiling, []
        self.start, self.stop, self.wait = self.ways.append, lambda _: None, lambda: None


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ranks_time_as_many_steps_whoever_is_profiled(monkeypatch, steps):
    store, ran = dist.HashStore(), {}
    monkeypatch.setattr(c10d, "world_size", lambda: 2)
    here = threading.local()
    monkeypatch.setattr(codes, "Clocks", lambda _: here.clocks)

    def run(tuning, rank):
        here.clocks = Here(is_profiling=rank == 1)
        _, walls = tuning._timed(steps, alone=True)
        _, after = tuning._timed(2, alone=False)
        ran[rank] = here.clocks.ways, len(walls), len(after), tuning.ranks._steps

    tunings = []
    for rank in range(2):
        monkeypatch.setattr(c10d, "global_rank", lambda rank=rank: rank)
        tunings.append(session._Tuning(Orders(store, rank, None), lambda: None, steps, "t"))
    threads = [threading.Thread(target=run, args=(t, r)) for r, t in enumerate(tunings)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert ran[0] == ran[1]
    ways = ["alone", "scheduled"] * 3
    assert ran[0] == (
        [*ways[: {1: 2, 2: 2, 5: 4}[steps]], "scheduled"],
        1,
        1,
        max(steps, 3) + 2,
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"runs": "cuda graph"}, "a CUDA graph replays it"),
        ({"nodes": NODES[:4]}, "its code launches in another order than the graph"),
    ],
)
def test_graphs_that_a_profile_cannot_tell_keep_their_code_and_are_named(tuned, fields, why):
    device = Device(US)
    report = tuned(device, **fields)
    assert report.decision == "left" and why in report.why
    assert not device.profiles


def test_costs_that_are_measured_by_themselves_are_of_cpus_alone(made):
    found = made(Device(US))
    measured.times_of("here", "measured")
    by_itself._noted(found)
    assert not by_itself._running
    assert not codes.Clocks().is_profiling and not codes.Clocks().calls()


def of_rank(made, device):
    """One rank's evidence of two steps in each way."""
    found = made(device)
    clocks = codes.Clocks(device)
    for way in codes.WAYS * 2:
        clocks.start(way)
        found.step()
        clocks.stop(way)
    return evidence(clocks, [1.0])


def test_ranks_make_one_table_and_the_slow_one_is_named(made):
    slow = Device({name: us * (1.5 if name != "gather" else 1.0) for name, us in US.items()})
    theirs = of_rank(made, slow)
    found = Findings.of_text(findings({0: of_rank(made, Device(US)), 1: theirs}, steps=2, world=2))
    assert set(found.slow) == {1} and found.slow[1] == pytest.approx(1.5, rel=0.05)
    (times,) = found.tables.values()
    (of_graph,) = times.graphs.values()
    assert of_graph.nodes["mm"].us == pytest.approx(1.5 * 3000, rel=0.02)


def test_one_rank_that_cannot_read_its_profile_leaves_the_graph_for_all(made):
    lost = Device(US)
    lost.spoil = lambda events: [e for e in events if "nccl" not in e["name"]]
    both = {0: of_rank(made, Device(US)), 1: of_rank(made, lost)}
    with pytest.raises(ValueError, match=r"not timed: on rank 1 launch 0 \(all_gather\) started"):
        findings(both, steps=2, world=2)
    assert json.loads(both[1])["graphs"]
