"""Ranks side by side."""

import dataclasses
import json

import pytest

from dynamo_dist.diagnostics import merge_ranks


def ranks(report, *changes):
    return [
        dataclasses.replace(report(rank=i, world_size=len(changes)), **c)
        for i, c in enumerate(changes)
    ]


def differences(merged):
    return [(d.what, d.values) for d in merged.differences]


def test_equal_ranks_do_not_differ(report):
    merged = merge_ranks(ranks(report, {}, {}, {})[::-1])
    assert merged.differences == ()
    assert merged.missing == ()
    assert [r.rank for r in merged.reports] == [0, 1, 2]
    assert merged.first.rank == 0


def test_group_names_do_not_count(report, graph):
    other = graph(order=("launch all_gather 7", "kernel", "wait 0", "kernel"))
    renamed = dataclasses.replace(other.collectives[0], group_name="7")
    other = dataclasses.replace(other, collectives=(renamed,))
    assert merge_ranks(ranks(report, {}, {"graphs": (other,)})).differences == ()


def test_a_rank_with_other_breaks_is_named(report):
    merged = merge_ranks(ranks(report, {}, {}, {"breaks": ()}))
    assert differences(merged) == [
        ("graph breaks", (("Data-dependent branching at model.py:30", (0, 1)), ("none", (2,))))
    ]


def test_the_first_place_where_orders_differ_is_named(report, graph):
    order = ("launch all_gather tp", "wait 0", "kernel", "kernel")
    merged = merge_ranks(ranks(report, {}, {"graphs": (graph(order=order),)}, {}))
    assert differences(merged) == [
        ("forward: order", (("#2 of 4: kernel", (0, 2)), ("#2 of 4: wait 0", (1,))))
    ]


def test_launches_and_payloads_are_compared(report, graph):
    (launch,) = graph().collectives
    twice = graph(collectives=(launch, launch))
    larger = graph(collectives=(dataclasses.replace(launch, payload_bytes=(1 << 20) + 2),))
    merged = merge_ranks(ranks(report, {}, {}, {"graphs": (twice,)}, {"graphs": (larger,)}))
    assert differences(merged) == [
        (
            "forward: launches",
            (("ends of 1", (0, 1, 3)), ("#2 of 2: all_gather over 8, bfloat16", (2,))),
        ),
        (
            "forward: payload",
            (
                ("#1 of 1: all_gather of 1048576 bytes", (0, 1)),
                ("#2 of 2: all_gather of 1048576 bytes", (2,)),
                ("#1 of 1: all_gather of 1048578 bytes", (3,)),
            ),
        ),
    ]


def test_a_rank_without_a_graph_differs(report):
    merged = merge_ranks(ranks(report, {}, {"graphs": ()}))
    assert differences(merged) == [("graphs", (("1 graph: forward", (0,)), ("none", (1,))))]


def test_missing_ranks_are_told(report):
    merged = merge_ranks([report(rank=1, world_size=4)])
    assert merged.missing == (0, 2, 3)


def test_json(report):
    data = json.loads(json.dumps(merge_ranks(ranks(report, {}, {"breaks": ()})).to_json()))
    assert list(data) == ["schema", "world_size", "missing", "differences", "reports"]
    assert data["differences"][0]["values"][1] == {"value": "none", "ranks": [1]}
    assert len(data["reports"]) == 2


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        (lambda r: [], "got no reports"),
        (lambda r: [r(), r()], "two reports of rank 1"),
        (lambda r: [r(), r(rank=0, world_size=2)], "2 and 8 ranks"),
    ],
)
def test_what_does_not_belong_together_is_refused(report, reports, message):
    with pytest.raises(ValueError, match=message):
        merge_ranks(reports(report))
