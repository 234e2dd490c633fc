"""What a schedule by measured costs has otherwise, in words."""

import dataclasses

from inductor_passes.records import CollectiveRecord
from inductor_passes.tuning.changes import changes, is_changed

ORDER = ("launch all_gather 0", "kernel", "wait 0", "launch all_gather 0", "wait 1", "kernel")
EARLIER = ("launch all_gather 0", "launch all_gather 0", "kernel", "wait 0", "wait 1", "kernel")


def gathers(*sizes):
    return tuple(
        CollectiveRecord(f"gather_{i}", "all_gather", "0", 2, size, "float32", None, "", 1.0, 0, 0)
        for i, size in enumerate(sizes)
    )


def test_launches_that_move_or_are_merged_are_counted(graph):
    before = graph(graph="abc", order=ORDER, collectives=gathers(100, 100))
    moved = dataclasses.replace(before, order=EARLIER)
    merged = dataclasses.replace(
        before, order=("launch all_gather 0", "kernel", "wait 0"), collectives=gathers(200)
    )
    other = dataclasses.replace(before, graph="other")
    assert changes([before], [before, other]) == (f"{before.phase}: nothing",)
    (line,) = changes([before], [moved])
    assert "1 of 2 launches and their waits stand behind other products" in line
    (line,) = changes([before], [merged])
    assert "1 launches instead of 2, the largest of 200 bytes instead of 100" in line


def test_a_graph_is_changed_by_its_order_its_payloads_and_its_parts_and_by_no_time(graph):
    before = graph(graph="abc", order=ORDER, collectives=gathers(100, 100))
    timed = dataclasses.replace(before.after, makespan_us=before.after.makespan_us + 5.0)
    assert not is_changed([before], [dataclasses.replace(before, after=timed)])
    assert not is_changed([before], [])
    assert is_changed([before], [dataclasses.replace(before, order=EARLIER)])
    assert is_changed([before], [dataclasses.replace(before, collectives=gathers(50, 150))])
    assert is_changed([before], [dataclasses.replace(before, graph="other")])
