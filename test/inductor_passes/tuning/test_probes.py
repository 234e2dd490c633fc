"""Which second payloads ranks launch: the same on all of a group, or none; and what they say of a link."""

import dataclasses

import pytest

from inductor_passes.attach import measured
from inductor_passes.machine.prices.alpha_beta import collective_us
from inductor_passes.machine.prices.group_shape import GroupShape
from inductor_passes.machine.prices.shown import topology_of
from inductor_passes.machine.times.file import of_text, to_text
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, Times
from inductor_passes.machine.topology.topology import load_topology
from inductor_passes.records import CollectiveRecord, NodeRecord
from inductor_passes.tuning import probes
from inductor_passes.tuning.probes import Probe, launch_times, plan, wanted

GROUPS = {"0": (0, 1, 2, 3), "row": (0, 1), "one": (0,)}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    monkeypatch.setattr(probes, "real_group_ranks", GROUPS.get)
    monkeypatch.setattr(probes, "own_name", lambda name: name)


@pytest.fixture
def record(graph):
    def make(*launched):
        collectives = tuple(
            CollectiveRecord(f"c{i}", kind, group, len(GROUPS.get(group, ())), size, dtype, None, "", 1.0, 0.0, 0.0)
            for i, (kind, group, size, dtype) in enumerate(launched)
        )  # fmt: skip
        nodes = tuple(
            NodeRecord(c.name, "launch", c.kind, 1.0, i, hosts=1) for i, c in enumerate(collectives)
        )
        return graph(collectives=collectives, nodes=nodes)

    return make


def test_what_shows_one_payload_gets_another_and_what_shows_two_does_not(record):
    found = wanted(
        [
            record(("all_gather", "0", MIB, "float32"), ("all_reduce", "row", 1000, "bfloat16")),
            record(("all_gather", "0", MIB, "float32"), ("reduce_scatter", "0", MIB, "float32")),
            record(("reduce_scatter", "0", 4 * MIB, "float32"), ("broadcast", "0", 8, "float32")),
            record(("all_reduce", "one", MIB, "float32"), ("all_reduce", "gone", 8, "float32")),
            record(("all_to_all", "0", MIB, "int64")),
        ]
    )
    assert found == [
        Probe((0, 1), "row", "all_reduce", "bfloat16", 1, 16000),
        Probe((0, 1, 2, 3), "0", "all_gather", "float32", 1, MIB // 16),
    ]
    assert [Probe.from_json(each.to_json()) for each in found] == found


def test_no_rank_launches_what_another_of_its_group_does_not():
    gather = Probe((0, 1, 2, 3), "0", "all_gather", "float32", 1, 64)
    row, other = (Probe((0, 1), "row", "all_reduce", "float32", 1, size) for size in (64, 128))
    column = Probe((1, 3), "column", "all_reduce", "float32", 1, 64)
    of_ranks = {0: [gather, row], 1: [gather, other, column], 2: [gather], 3: [column, gather]}
    assert plan(of_ranks) == [gather, column]
    assert plan({**of_ranks, 2: []}) == [column]
    assert plan({rank: of_ranks[rank] for rank in (0, 2)}) == []
    many = [dataclasses.replace(row, payload_bytes=size) for size in range(99)]
    assert plan({0: many, 1: many[::-1]}) == many[: probes.MOST]


def test_a_probe_takes_from_the_last_rank_to_the_slowest_result():
    probe = Probe((0, 1), "row", "all_reduce", "float32", 1, 64)
    spans = {
        0: {0: [(0.0, 5e-6), (1.0, 1.0 + 9e-6)]},
        1: {0: [(3e-6, 6e-6), (1.0 + 2e-6, 1.0 + 7e-6)]},
    }
    (found,) = launch_times([probe], spans)
    assert (found.kind, found.ranks, found.nodes, found.payload_bytes) == ("all_reduce", 2, 1, 64)
    assert found.us == pytest.approx((3 + 7) / 2, abs=1e-3)


def test_two_payloads_tell_a_floor_from_a_rate():
    base = load_topology("cpu-gloo")
    floor, rate = 900.0, 1e-3

    def us(size):
        return floor + rate * size

    def launch(size, predicted_us):
        return LaunchTime("all_gather", 2, 1, size, us(size), predicted_us)

    graph = GraphTimes("forward", {}, {"gather": launch(MIB, 700.0)})
    one = Times("m", "2.13", 2, 4, {"g": graph})
    two = dataclasses.replace(one, probes=(launch(MIB // 16, 0.0),))
    assert of_text(to_text(two)) == two and two.digest != one.digest

    def error(times):
        shown = topology_of(base, times)
        return max(
            abs(collective_us("all_gather", size, GroupShape(2, 1), shown) / us(size) - 1)
            for size in (MIB // 64, MIB // 4, 4 * MIB)
        )

    assert error(two) < 0.02 < 0.2 < error(one)
    # Links of which nothing was measured go by what was predicted alone.
    assert topology_of(base, two).intra_gb_per_s == topology_of(base, one).intra_gb_per_s
    assert measured.of_all({"here": two}).probes == two.probes
