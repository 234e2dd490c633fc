"""Totals."""

import dataclasses

from inductor_passes.report.figures import alike, order_text, titled, totals


def test_times_add_up_and_the_largest_peak_counts(graph):
    small = graph(graph_id="1/0:backward", phase="backward")
    total = totals((graph(), small))
    assert (total.graphs, total.launches) == (2, 2)
    assert (total.exposed_before_us, total.exposed_after_us) == (160.0, 40.0)
    assert (total.makespan_before_us, total.makespan_after_us) == (460.0, 340.0)
    assert (total.peak_before_bytes, total.peak_after_bytes) == (3 << 20, 4 << 20)
    assert total.launches_by_kind == (("all_gather", 2),)


def test_nothing_seen():
    total = totals(())
    assert (total.graphs, total.launches, total.peak_after_bytes) == (0, 0, 0)


def test_titles_are_numbered_where_a_phase_has_several(graph):
    phases = [graph(phase=p) for p in ("forward", "backward", "forward")]
    assert [title for title, _ in titled(phases)] == ["forward 1", "backward", "forward 2"]


def test_order(graph):
    assert order_text(graph(order_kept=True)) == "order kept in the generated code"
    assert "NOT kept" in order_text(graph(order_kept=False))
    assert order_text(graph(order_kept=None)) == "generated code not looked at"


def test_launches_that_differ_in_time_alone_are_one_row(graph):
    (one,) = graph().collectives
    longer = dataclasses.replace(one, name="b", exposed_after_us=50.0, why_exposed="channel")
    other = dataclasses.replace(one, name="c", payload_bytes=1, exposed_after_us=60.0)
    first, second, third = alike((one, longer, dataclasses.replace(other, stack=""), other))
    assert (first.count, first.exposed_before_us, first.exposed_after_us) == (2, 160.0, 70.0)
    assert first.why_exposed == "channel"  # of the one that is exposed most
    assert {second.first.stack, third.first.stack} == {"", one.stack}
