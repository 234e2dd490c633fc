import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from programs import EVERY_KIND, GATHERS, RANKS, MergeAll, every_kind, gathers, wait

import inductor_passes as ip
from inductor_passes.errors import OptionError
from inductor_passes.graph_pass import ScheduleOptions
from inductor_passes.pass_options import split
from inductor_passes.pipeline import run_pass
from inductor_passes.records import PassRecord, restored
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.simulate import simulate
from inductor_passes.testing import FixedCost, dump, fake_group, trace

c10d = torch.ops._c10d_functional
COST = FixedCost(launch=8, mm=10)


@pytest.fixture(autouse=True)
def four_ranks(request):
    if "alike" in request.node.name:
        yield
        return
    with fake_group(RANKS):
        yield


def test_gathers_hide_behind_products():
    graph = trace(gathers, *GATHERS)
    before = simulate(graph, COST)
    record = run_pass(ScheduleGraph(COST), graph).schedule
    after = simulate(graph, COST)
    assert after.makespan_us == record.makespan_after_us == record.bound_us == 8 + 4 * 10
    assert before.makespan_us == record.makespan_before_us == 4 * 18
    assert record.gap == 0 and record.launches == 4
    assert [item.reason for item in record.exposed] != []


def test_makespan_equals_the_timelines_under_slowdown():
    cost = FixedCost(launch=8, mm=10)
    cost.compute_stretch = 1.5
    graph = trace(gathers, *GATHERS)
    before = simulate(graph, cost)
    record = run_pass(ScheduleGraph(cost, ScheduleOptions(bucket=False)), graph).schedule
    after = simulate(graph, cost)
    assert record.makespan_before_us == before.makespan_us == 4 * 18
    # Beside each gather but the first, 8 us in which 8 / 1.5 are computed.
    assert record.makespan_after_us == pytest.approx(after.makespan_us)
    assert after.makespan_us == pytest.approx(8 + 4 * 10 + 3 * (8 - 8 / 1.5))
    assert record.bound_us == 8 + 4 * 10 and record.gap > 0


def test_a_graph_with_nothing_to_gain_is_left_alone():
    def needed_at_once(x):
        return wait(c10d.all_reduce(x @ x, "sum", "0")) + 1

    graph = trace(needed_at_once, [16, 16])
    before = dump(graph)
    record = run_pass(ScheduleGraph(COST), graph)
    assert not record.changed and dump(graph) == before
    assert "left alone: 0.0% to gain, less than 1%" in record.schedule.decision


def test_a_second_run_changes_nothing():
    graph = trace(gathers, *GATHERS)
    run_pass(ScheduleGraph(COST), graph)
    once = dump(graph)
    assert not run_pass(ScheduleGraph(COST), graph).changed
    assert dump(graph) == once


def test_buckets_that_do_not_pay_in_the_graph_are_dropped():
    class Wishful(MergeAll):
        _pays = ScheduleGraph._pays

        def solve(self, problem, *, bucket, **limits):
            if bucket:
                return super().solve(problem, bucket=True, **limits)
            return ScheduleGraph.solve(self, problem, bucket=False, **limits)

    graph = trace(gathers, *GATHERS)
    assert run_pass(Wishful(FixedCost(launch=8, mm=10, cat=1000)), graph).schedule.buckets == 0


def test_the_memory_cap_holds():
    def peak(extra_bytes):
        graph = trace(gathers, *GATHERS)
        options = ScheduleOptions(extra_memory_ratio=0.0, extra_memory_bytes=extra_bytes)
        record = run_pass(ScheduleGraph(COST, options), graph).schedule
        assert record.peak_after_bytes <= record.peak_before_bytes + extra_bytes
        return simulate(graph, COST).peak_bytes

    assert peak(0) <= peak(1 << 30)


def test_nothing_passes_an_effect_and_the_report_says_so():
    library = torch.library.Library("test_schedule", "FRAGMENT")
    library.define("note(Tensor x) -> ()")
    library.impl("note", lambda x: None, "Meta")

    def program(x, v, w):
        y = x @ wait(c10d.all_gather_into_tensor(v, RANKS, "0")) @ x
        torch.ops.test_schedule.note(x)
        z = x @ x
        return y, z @ wait(c10d.all_gather_into_tensor(w, RANKS, "0"))

    graph = trace(program, [16, 16], [4, 16], [4, 16])
    record = ip.run_passes(graph, ip.PassOptions(passes=("schedule",)))
    names = [n.name for n in graph.nodes]
    assert names.index("mm_1") < names.index("note") < names.index("all_gather_into_tensor_1")
    assert any("note" in warning for warning in record.warnings)
    library._destroy()


def test_where_ranks_differ_launches_keep_the_programs_order():
    def program(x, v, w):
        late = wait(c10d.all_gather_into_tensor(v, RANKS, "0"))
        early = wait(c10d.all_gather_into_tensor(w, RANKS, "0"))
        return x @ early @ x @ x @ late

    graph = trace(program, [16, 16], [4, 16], [4, 16])
    run_pass(ScheduleGraph(COST, ranks_differ=True), graph)
    names = [n.name for n in graph.nodes if "all_gather" in n.name]
    assert names == ["all_gather_into_tensor", "all_gather_into_tensor_1"]


def test_the_scheduler_runs_unless_it_is_off():
    record = ip.run_passes(trace(gathers, *GATHERS))
    assert {p.name: p.status for p in record.passes}["schedule"] == "ran"
    off = ip.run_passes(trace(gathers, *GATHERS), ip.PassOptions(schedule="off"))
    assert "schedule" not in {p.name for p in off.passes}


def test_options():
    own, _ = split({"schedule": {"bucket": False}})
    assert own.schedule == ScheduleOptions(bucket=False)
    assert own.digest() != split({})[0].digest()
    for given, message in (
        ({"memory": 1}, "unknown key 'memory'"),
        ({"extra_memory_ratio": -1}, "at least 0"),
        ({"bucket": 1}, "True or False"),
        ("fast", "'off'"),
    ):
        with pytest.raises(OptionError, match=message):
            split({"schedule": given})


def test_what_decides_is_in_the_digest():
    digests = {
        ScheduleGraph(COST).digest(),
        ScheduleGraph(COST, exact=True).digest(),
        ScheduleGraph(COST, ranks_differ=True).digest(),
        ScheduleGraph(COST, ScheduleOptions(bucket=False)).digest(),
        ScheduleGraph(FixedCost(launch=9)).digest(),
    }
    assert len(digests) == 5


def test_a_record_survives_json():
    record = run_pass(ScheduleGraph(COST), trace(gathers, *GATHERS))
    assert restored(PassRecord, json.loads(json.dumps(dataclasses.asdict(record)))) == record


def test_every_rank_decides_alike():
    def order(rank):
        with fake_group(RANKS, rank=rank):
            graph = trace(every_kind, *EVERY_KIND)
            ip.run_passes(graph, ip.PassOptions(topology="cpu-gloo"))
            return dump(graph)

    assert len({order(rank) for rank in range(RANKS)}) == 1


HASHED = """
from programs import *
import inductor_passes as ip
from inductor_passes.testing import dump, fake_group, trace
with fake_group(RANKS):
    graph = trace(every_kind, *EVERY_KIND)
    ip.run_passes(graph, ip.PassOptions(topology="cpu-gloo"))
    print(dump(graph))
"""


@pytest.mark.slow
def test_the_hash_seed_decides_nothing(pytestconfig):
    here = str(pytestconfig.rootpath / "test" / "inductor_passes" / "schedule")
    path = os.pathsep.join([here, str(pytestconfig.rootpath)])
    shown = {
        subprocess.run(
            [sys.executable, "-c", HASHED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1
