"""What was measured stands in the place of the topology's figures, whoever asks."""

import dataclasses
import itertools

import pytest

from inductor_passes.machine import load_topology
from inductor_passes.machine.prices.group_shape import GroupShape
from inductor_passes.machine.prices.machine import Machine
from inductor_passes.machine.prices.shown import curve, topology_of
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime, Times

BASE = load_topology("cpu-gloo")
PAIR = GroupShape(2, 1)
PRODUCT = (1, 64, 64, 64)


def times(nodes=(), launches=(), **more):
    graph = GraphTimes(
        "forward",
        {f"n{i}": node for i, node in enumerate(nodes)},
        {f"l{i}": launch for i, launch in enumerate(launches)},
    )
    return Times("m", "t", 2, 20, {"g": graph}, **more)


def gather(payload, us, machine=Machine(BASE)):
    return LaunchTime(
        "all_gather", 2, 1, payload, us, machine.call_us("all_gather", [payload], PAIR)
    )


def test_a_product_that_ran_counts_as_it_did():
    machine = Machine(BASE, times([NodeTime("mm", 77.0, 20.0, "float32", PRODUCT)]))
    assert machine.product_us("float32", PRODUCT, 1e4) == 77.0


def test_kernels_that_did_not_run_are_scaled_by_those_that_did():
    slow = Machine(BASE, times([NodeTime("relu", 40.0, 10.0)]))
    assert slow.kernel_us(1e6) == pytest.approx(4 * Machine(BASE).kernel_us(1e6))
    other = (1, 128, 128, 128)
    assert slow.product_us("float32", other, 1.0) == pytest.approx(
        4 * Machine(BASE).product_us("float32", other, 1.0)
    )


def test_two_payloads_tell_start_and_rate():
    truth = lambda payload: 300.0 + payload / 50.0  # noqa: E731
    machine = Machine(BASE, times(launches=[gather(p, truth(p)) for p in (2**14, 2**20)]))
    for payload in (2**10, 2**12, 2**17, 2**22, 2**24):
        assert machine.call_us("all_gather", [payload], PAIR) == pytest.approx(
            truth(payload), rel=0.01
        )


def test_one_payload_moves_the_curve():
    plain = Machine(BASE)
    machine = Machine(BASE, times(launches=[gather(2**16, 3 * gather(2**16, 0).predicted_us)]))
    for payload in (2**12, 2**16, 2**20):
        assert machine.call_us("all_gather", [payload], PAIR) == pytest.approx(
            3 * plain.call_us("all_gather", [payload], PAIR), rel=0.02
        )


def test_another_kind_follows_what_was_measured():
    plain = Machine(BASE)
    machine = Machine(BASE, times(launches=[gather(2**16, 2 * gather(2**16, 0).predicted_us)]))
    assert machine.call_us("broadcast", [2**16], PAIR) == pytest.approx(
        2 * plain.call_us("broadcast", [2**16], PAIR), rel=0.02
    )


def test_curves_never_fall_and_never_go_below_nothing():
    points = curve([(1e4, 50.0), (1e6, 5000.0)], [(float(2**i), 1.0) for i in range(10, 30)])
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(points))
    assert all(us >= 0 for _, us in points)


def test_stretch_is_the_measured_one_and_nothing_measured_changes_nothing():
    assert topology_of(BASE, times(compute_stretch=1.5)).compute_stretch == 1.5
    same = topology_of(BASE, times(compute_stretch=BASE.compute_stretch))
    assert dataclasses.replace(same, collectives=BASE.collectives) == BASE
