"""Boxes of a timeline: exposed parts, tiny spans."""

import dataclasses
import itertools

import pytest

from inductor_passes.records import SpanRecord, TimelineRecord
from inductor_passes.report.render_html import draw, ticks


def timeline(*spans):
    records = tuple(
        SpanRecord(lane, f"{lane}{i}", kind, a, b) for i, (lane, kind, a, b) in enumerate(spans)
    )
    return TimelineRecord(records, 0.0, 0.0, 0.0, 0.0, 0)


def test_memory_keeps_its_peaks_and_its_last_value():
    changes = tuple((i / 1000, 5 if i == 77 else 1 + i % 3) for i in range(4000))
    given = dataclasses.replace(timeline(("compute", "compute", 0.0, 4.0)), memory=changes)
    drawn = draw(given, scale_us=4.0).memory
    assert len(drawn) <= 4004
    assert max(size for _, size in drawn) == 5
    assert drawn[-1] == changes[-1]
    wide = draw(given, scale_us=4e4).memory
    assert (wide[0][1], wide[-1]) == (5, changes[-1])
    assert len(wide) <= 2


def shown(picture):
    return {
        lane.name: [(b.style, b.start_us, b.duration_us, b.count) for b in lane.boxes]
        for lane in picture.lanes
    }


def test_a_launch_is_exposed_where_compute_stands_still():
    picture = draw(
        timeline(
            ("compute", "compute", 0.0, 10.0),
            ("tp", "all_gather", 4.0, 16.0),
            ("compute", "wait", 10.0, 10.0),
            ("compute", "compute", 20.0, 5.0),
        ),
        scale_us=25.0,
    )
    assert shown(picture) == {
        "compute": [
            ("compute", 0.0, 10.0, 1),
            ("wait", 10.0, 10.0, 1),
            ("compute", 20.0, 5.0, 1),
        ],
        "tp": [("hidden", 4.0, 6.0, 1), ("exposed", 10.0, 10.0, 1)],
    }
    assert [lane.busy_us for lane in picture.lanes] == [15.0, 16.0]


def test_communication_around_and_after_compute_is_exposed():
    picture = draw(
        timeline(
            ("tp", "all_reduce", 0.0, 30.0),
            ("compute", "compute", 5.0, 5.0),
            ("compute", "compute", 10.0, 5.0),
            ("dp", "all_reduce", 40.0, 5.0),
        ),
        scale_us=45.0,
    )
    boxes = shown(picture)
    assert boxes["tp"] == [
        ("exposed", 0.0, 5.0, 1),
        ("hidden", 5.0, 10.0, 1),
        ("exposed", 15.0, 15.0, 1),
    ]
    assert boxes["dp"] == [("exposed", 40.0, 5.0, 1)]


def test_exposed_boxes_add_up_to_the_timelines_figure(graph):
    for record in (graph().before, graph().after):
        picture = draw(record, record.makespan_us)
        exposed = sum(
            b.duration_us for lane in picture.lanes for b in lane.boxes if b.style == "exposed"
        )
        assert exposed == pytest.approx(record.exposed_us)


def test_tiny_spans_are_drawn_together_and_keep_their_time():
    spans = [("compute", "compute", i * 1.0, 0.5) for i in range(20_000)]
    picture = draw(timeline(*spans, ("compute", "compute", 20_000.0, 5_000.0)), scale_us=25_000.0)
    (lane,) = picture.lanes
    assert len(lane.boxes) <= 2_001
    assert sum(box.count for box in lane.boxes) == 20_001
    assert lane.boxes[-1].count == 1
    assert sum(box.busy_us for box in lane.boxes) == pytest.approx(15_000.0)
    assert all(a.start_us + a.duration_us <= b.start_us for a, b in itertools.pairwise(lane.boxes))


def test_tiny_spans_of_different_style_stay_apart():
    spans = [("compute", "compute" if i % 2 else "wait", i * 0.1, 0.1) for i in range(10)]
    (lane,) = draw(timeline(*spans), scale_us=10_000.0).lanes
    assert len(lane.boxes) == 10


def test_a_whole_step_has_a_lane_of_its_stages():
    named = ("forward", "forward", "backward", "update", "backward")
    spans = [
        SpanRecord("compute", f"n{i}", "compute", i * 10.0, 10.0, stage=stage)
        for i, stage in enumerate(named)
    ]
    picture = draw(TimelineRecord(tuple(spans), 50.0, 50.0, 0.0, 0.0, 0), 50.0)
    assert [lane.name for lane in picture.lanes] == ["stage", "compute"]
    assert shown(picture)["stage"] == [
        ("forward", 0.0, 20.0, 2),
        ("backward", 20.0, 10.0, 1),
        ("update", 30.0, 10.0, 1),
        ("backward", 40.0, 10.0, 1),
    ]


def test_lanes_keep_the_order_asked_for():
    picture = draw(timeline(("b", "all_reduce", 0.0, 1.0)), 1.0, ("a", "b"))
    assert [lane.name for lane in picture.lanes] == ["compute", "a", "b"]
    assert shown(picture)["a"] == []


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0.0, [0.0]),
        (7.5, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1600.0, [0, 200, 400, 600, 800, 1000, 1200, 1400, 1600]),
    ],
)
def test_ticks_are_round(scale, expected):
    assert ticks(scale) == expected
