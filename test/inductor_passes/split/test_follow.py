"""Ranks that settle on one plan: it names each part, and another rank's graph is cut as it says,
or not at all.
"""

import pytest
import torch

from inductor_passes.errors import CannotFollowError
from inductor_passes.graph.collectives import launches
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.ranks.collective_trace import Frame, LaunchPlan, number_launches, plan_of
from inductor_passes.split.split_pass import FollowSplit, SplitRegions
from inductor_passes.testing import FixedCost, dump, fake_group, run_on_ranks, trace

c10d = torch.ops._c10d_functional
RANKS = 4


class ByRows(FixedCost):
    def compute_us(self, node):
        return float(node.meta["val"].numel()) if "mm" in str(node.target) else 0.0

    def link_us(self, launch, payload_bytes):
        return sum(payload_bytes) / 4

    def launch_us(self, launch):
        return self.link_us(launch, [launch.meta["val"].numel() * 4])


def reduced(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def program(x, a, b):
    most = c10d.wait_tensor(c10d.all_reduce(a.sum(), "max", "0"))
    return reduced(reduced(x @ a) @ b), most


def numbered(rows=8, dynamic=False):
    graph = trace(program, [rows, 6], [6, 6], [6, 6], world_size=RANKS, dynamic=dynamic)
    stream = number_launches(
        graph, lambda name: tuple(range(RANKS)), Frame(), phase="inference", graph_id="g"
    )
    return graph, stream


def planned(parts=2):
    graph, _ = numbered()
    assert (
        run_passes(graph, PassOptions(extra={"split": parts}), cost=ByRows()).split.parts == parts
    )
    return graph, plan_of(graph)


def test_a_plan_names_each_part_and_survives_its_text():
    _, plan = planned()
    assert plan.parts == {1: (2, "dimension 0"), 2: (2, "dimension 0")}
    assert "1: part 1 of 2 along dimension 0" in plan.text
    assert LaunchPlan.of(plan.text) == plan


@pytest.mark.parametrize("parts", [2, 4])
def test_another_rank_cuts_as_the_plan_says(parts):
    with fake_group(RANKS):
        graph, stream = numbered()
        given = [
            [torch.randint(-3, 4, s).float() for _ in range(RANKS)]
            for s in ((8, 6), (6, 6), (6, 6))
        ]
        expected = run_on_ranks(graph, *given)
        _, plan = planned(parts)
        run_passes(
            graph,
            PassOptions(extra={"split": parts}),
            cost=ByRows(),
            follow=LaunchPlan.of(plan.text),
        )
        assert plan_of(graph).text_for(stream) == plan.text_for(stream)
        assert len(launches(graph)) == 2 * parts + 1
        got = run_on_ranks(graph, *given)
    for one, other in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rows", [2, 7, 9])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_with_other_rows_follows_in_parts_of_its_own(rows, dynamic):
    _, plan = planned()
    graph, _ = numbered(rows=8 if dynamic else rows, dynamic=dynamic)
    with fake_group(RANKS):
        given = [
            [torch.randint(-3, 4, s).float() for _ in range(RANKS)]
            for s in ((rows, 6), (6, 6), (6, 6))
        ]
        expected = run_on_ranks(graph, *given)
        assert run_pass(FollowSplit(plan), graph).changed
        assert plan_of(graph).parts == plan.parts
        got = run_on_ranks(graph, *given)
    for one, other in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_graph_with_fewer_rows_than_parts_cannot_follow():
    _, plan = planned(parts=4)
    graph, _ = numbered(rows=3)
    before = dump(graph)
    with pytest.raises(CannotFollowError, match="no regions with the parts of the plan"):
        run_pass(FollowSplit(plan), graph)
    assert dump(graph) == before


def test_where_ranks_may_differ_nothing_is_cut():
    graph, _ = numbered()
    record = run_passes(graph, PassOptions(extra={"split": 2}), cost=ByRows(), ranks_differ=True)
    (said,) = [p for p in record.passes if p.name == SplitRegions.name]
    assert said.status == "skipped" and len(launches(graph)) == 3


@pytest.mark.parametrize("text", ['[[["0: part x"], "all_reduce"]]', '[[[null], "all_reduce"]]'])
def test_a_damaged_number_is_no_plan(text):
    with pytest.raises(ValueError, match="no launch plan"):
        LaunchPlan.of(text)
