"""Nodes of a graph beside the statements of its code."""

import pytest

from inductor_passes.records import NodeRecord
from inductor_passes.tuning.layout import layout_of


def node(name, event="compute", us=1.0, number=-1):
    return NodeRecord(name, event, "op", us, number)


NODES = (
    node("add"),
    node("gather", "launch", number=0),
    node("mm", "kernel", 10.0),
    node("relu", us=3.0),
    node("exp", us=1.0),
    node("wait", "wait", number=0),
    node("wait_again", "wait", number=0),
    node("mm_1", "kernel", 10.0),
    node("foreign", "wait", number=-1),
)
EVENTS = ("launch all_gather", "kernel", "wait 0", "wait 0", "kernel")


def test_segments_lie_between_launches_and_waits():
    layout = layout_of(NODES, EVENTS)
    assert layout.syncs == (0, 2)
    assert layout.numbers == (0, 0)
    assert layout.launches == {0: 0}
    inside = [[n.name for n in (*s.kernels, *s.others)] for s in layout.segments]
    assert inside == [["add"], ["mm", "relu", "exp"], ["mm_1"]]
    assert [s.clocked for s in layout.segments] == [(), (1,), (4,)]


def test_a_segment_is_shared_out_and_nothing_of_it_is_lost():
    alone, mixed, product = layout_of(NODES, EVENTS).segments
    assert alone.shared(7.0, []) == {"add": 7.0}
    assert mixed.shared(20.0, [12.0]) == {"mm": 12.0, "relu": 6.0, "exp": 2.0}
    assert product.shared(15.0, [12.0]) == {"mm_1": 15.0}


def test_kernels_of_another_number_share_by_prediction():
    _, mixed, _ = layout_of(NODES, ("launch all_gather", "wait 0", "kernel")).segments
    assert mixed.clocked == ()
    assert mixed.shared(28.0, []) == pytest.approx({"mm": 20.0, "relu": 6.0, "exp": 2.0})


def test_a_segment_without_nodes_takes_nothing():
    (_, middle, _) = layout_of(
        (node("g", "launch", number=0), node("w", "wait", number=0)), ("launch x", "wait 0")
    ).segments
    assert middle.shared(5.0, []) == {}


@pytest.mark.parametrize(
    "events",
    [
        ("wait 0", "launch all_gather"),
        ("launch all_gather",),
        ("launch all_gather", "launch all_gather", "wait 0", "wait 1"),
        (),
    ],
)
def test_code_in_another_order_has_no_layout(events):
    assert layout_of(NODES, events) is None
