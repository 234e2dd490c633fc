"""A graph that launches as a plan says which was made for another rank's graph."""

import pytest
import torch

from inductor_passes.errors import CannotFollowError
from inductor_passes.pipeline import run_passes
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    Frame,
    LaunchPlan,
    Planned,
    number_launches,
    plan_of,
)
from inductor_passes.testing import dump, fake_group, run_on_ranks, trace

c10d = torch.ops._c10d_functional
SUM, GATHER = "all_reduce sum float32", "all_gather float32"
RANKS = 4


def reduce(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def gather(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))


def two_sums_two_gathers(x, w):
    return reduce(x * 2) @ w, reduce(x + 1) @ w, gather(x * 3) @ w, gather(x - 1) @ w


def chained(x, w):
    return reduce(reduce(x * 2) @ w), gather(x), gather(x + 1)


def scatter(x):
    return c10d.reduce_scatter_tensor(x, "sum", RANKS, "0")


def sized(x, w):
    """What is launched, its size and what is computed of the size alone before it has arrived."""
    one, other = scatter(x * 2), c10d.all_gather_into_tensor(x * 4, RANKS, "0")
    rows, arrived = w.new_ones(one.size(0), other.size(0)), c10d.wait_tensor(other)
    return scatter_of(rows, x), c10d.wait_tensor(one) * arrived.size(0), arrived


def scatter_of(rows, x):
    return c10d.wait_tensor(scatter(x + 1)) + rows.sum()


def numbered(fn, rows, dynamic=False):
    graph = trace(fn, [rows, 8], [8, 8], dynamic=dynamic, world_size=RANKS)
    with_ranks = number_launches(
        graph, lambda name: tuple(range(RANKS)), Frame(), phase="inference", graph_id="g"
    )
    return graph, with_ranks


def plan(*launches):
    return LaunchPlan(tuple(Planned(tuple(members), what) for members, what in launches))


MERGED = plan(((3, 2), GATHER), ((0, 1), SUM))


@pytest.fixture(autouse=True)
def ranks():
    with fake_group(RANKS):
        yield


def test_the_program_is_a_plan_too():
    graph, stream = numbered(two_sums_two_gathers, 4)
    assert [launch.what for launch in stream.launches] == [SUM, SUM, GATHER, GATHER]
    assert plan_of(graph).text_for(stream) == PROGRAM
    assert LaunchPlan.of(plan_of(graph).text) == plan_of(graph)


@pytest.mark.parametrize("dynamic", [False, True])
def test_order_and_buckets_are_those_of_the_plan(dynamic):
    graph, _ = numbered(two_sums_two_gathers, 4, dynamic)
    record = run_passes(graph, follow=MERGED)
    assert plan_of(graph) == MERGED, dump(graph)
    assert any(p.name == "follow_plan" and p.counters["merged"] == 4 for p in record.passes)
    assert all(p.name != "merge_tiny" for p in record.passes)


def test_numbers_are_those_of_the_program():
    whole, _ = numbered(two_sums_two_gathers, 4)
    graph, _ = numbered(two_sums_two_gathers, 4)
    run_passes(graph, follow=MERGED)
    inputs = [[torch.randn(4, 8) for _ in range(RANKS)], [torch.randn(8, 8)] * RANKS]
    for rank, (mine, theirs) in enumerate(
        zip(run_on_ranks(graph, *inputs), run_on_ranks(whole, *inputs), strict=True)
    ):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, msg=f"rank {rank}")


def test_a_plan_from_fixed_sizes_is_followed_with_symbolic_ones():
    graph, stream = numbered(two_sums_two_gathers, 4)
    run_passes(graph)
    found = plan_of(graph)
    assert found.text_for(stream) != PROGRAM
    other, _ = numbered(two_sums_two_gathers, 6, dynamic=True)
    run_passes(other, follow=found)
    assert plan_of(other) == found


def test_sizes_of_what_is_launched_keep_no_launch_apart():
    graph, _ = numbered(sized, 8, dynamic=True)
    assert "sym_size" in dump(graph)
    wanted = plan(((2, 0), "reduce_scatter sum float32"), ((1,), GATHER))
    run_passes(graph, follow=wanted)
    assert plan_of(graph) == wanted, dump(graph)
    whole, _ = numbered(sized, 8)
    inputs = [[torch.randn(8, 8) for _ in range(RANKS)], [torch.randn(8, 8)] * RANKS]
    mine, theirs = run_on_ranks(graph, *inputs), run_on_ranks(whole, *inputs)
    torch.testing.assert_close(mine, theirs)


def exchanges(x, w):
    share = x.size(0) // RANKS
    even = [share] * RANKS
    one, other = (c10d.all_to_all_single(each, even, even, "0") for each in (x * 2, x + 1))
    return c10d.wait_tensor(one), c10d.wait_tensor(other)


def test_exchanges_whose_shares_are_symbols_are_merged():
    graph, _ = numbered(exchanges, 8, dynamic=True)
    wanted = plan(((0, 1), "all_to_all float32"))
    run_passes(graph, follow=wanted)
    assert plan_of(graph) == wanted, dump(graph)
    whole, _ = numbered(exchanges, 8)
    inputs = [[torch.randn(8, 8) for _ in range(RANKS)], [torch.randn(8, 8)] * RANKS]
    assert run_on_ranks(graph, *inputs)[1][1].equal(run_on_ranks(whole, *inputs)[1][1])


def sum_and_exchange(x, w):
    share = x.size(0) // RANKS
    sent = c10d.all_to_all_single(x * 2, [share] * RANKS, [share] * RANKS, "0")
    summed = c10d.reduce_scatter_tensor(x + 1, "sum", RANKS, "0")
    return c10d.wait_tensor(sent), c10d.wait_tensor(summed)


def test_another_kind_of_launch_is_not_merged():
    """The rank that plans may send its sum by an exchange; sizes that are symbols keep another
    one from it.
    """
    graph, _ = numbered(sum_and_exchange, 8, dynamic=True)
    with pytest.raises(CannotFollowError, match="all_to_all float32 and reduce_scatter sum"):
        run_passes(graph, follow=plan(((0, 1), "all_to_all float32")))


def wide_and_narrow(x, w):
    """Under autocast one weight is read in float32 and another in bfloat16, which is gathered
    so.
    """
    narrow = torch.ops.prims.convert_element_type(gather(x - 1), torch.bfloat16)
    return gather(x * 3) @ w, narrow @ w.bfloat16()


def test_launches_of_other_types_are_not_merged():
    graph, _ = numbered(wide_and_narrow, 4)
    with pytest.raises(CannotFollowError, match="bfloat16 and all_gather float32"):
        run_passes(graph, follow=plan(((0, 1), GATHER)))


def unequal(x, w):
    one = c10d.all_to_all_single(x * 2, [1, 1, 1, 1], [1, 1, 1, 1], "0")
    other = c10d.all_to_all_single(x + 1, [4, 0, 0, 0], [1, 1, 1, 1], "0")
    return c10d.wait_tensor(one), c10d.wait_tensor(other)


def test_exchanges_of_unequal_shares_are_not_merged():
    graph, _ = numbered(unequal, 4)
    with pytest.raises(CannotFollowError, match="unequal shares"):
        run_passes(graph, follow=plan(((0, 1), "all_to_all float32")))


@pytest.mark.parametrize(
    ("fn", "wanted", "says"),
    [
        (chained, plan(((1,), SUM), ((0,), SUM), ((2,), GATHER), ((3,), GATHER)), "another order"),
        (chained, plan(((0, 1), SUM), ((2, 3), GATHER)), "another order|of its bucket"),
        (chained, plan(((0,), SUM), ((1,), SUM), ((2,), GATHER)), "leaves out 1 launch"),
        (chained, plan(((0,), SUM), ((4,), SUM)), "no launch of its own"),
    ],
)
def test_a_graph_that_cannot_says_so(fn, wanted, says):
    graph, _ = numbered(fn, 4)
    with pytest.raises(CannotFollowError, match=says):
        run_passes(graph, follow=wanted)


def test_a_second_run_changes_nothing():
    graph, _ = numbered(two_sums_two_gathers, 4)
    run_passes(graph, follow=MERGED)
    before = plan_of(graph)
    run_passes(graph, follow=plan(((3, 2), GATHER), ((0, 1), SUM)))
    assert plan_of(graph) == before
