import dataclasses
import itertools

import pytest
import torch
from programs import EVERY_KIND, GATHERS, RANKS, every_kind, gathers, wait

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.graph.dependencies import barriers, shows_that_ranks_differ
from inductor_passes.schedule.extract import extract
from inductor_passes.schedule.solver.evaluate import check_schedule, evaluate
from inductor_passes.schedule.solver.problem import check_problem, program_order
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.simulate import simulate
from inductor_passes.testing import FixedCost, fake_group, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def four_ranks():
    with fake_group(RANKS):
        yield


def behind(extracted, name):
    """Names of the nodes that a node stays behind, tokens resolved."""
    problem = extracted.problem
    (number,) = [n for n in problem.nodes if n.name == name]
    return {problem.nodes[d].name.removeprefix("after ") for d in number.deps}


def behind_a_launch(x):
    """A collective that blocks, on a channel that is busy, beside another."""
    gathered = c10d.all_gather_into_tensor(x, RANKS, "0")
    whole = torch.ops._dtensor.shard_dim_alltoall(x @ x, 0, 1, "0")
    return wait(gathered).sum() + (whole.view(x.shape) @ x).sum()


@pytest.mark.parametrize("stretch", [1.0, 1.5])
@pytest.mark.parametrize(
    "program, shapes",
    [(gathers, GATHERS), (every_kind, EVERY_KIND), (behind_a_launch, [[1024, 1024]])],
)
def test_the_problem_predicts_what_the_simulator_does(program, shapes, stretch):
    graph = trace(program, *shapes)
    topology = dataclasses.replace(load_topology("h100x8"), compute_stretch=stretch)
    cost = TopologyCostModel(topology)
    problem = extract(graph, cost).problem
    check_problem(problem)
    evaluated, timeline = evaluate(problem, program_order(problem)), simulate(graph, cost)
    assert evaluated.makespan_us == pytest.approx(timeline.makespan_us)
    assert evaluated.exposed_us == pytest.approx(timeline.exposed_us)
    assert evaluated.peak_bytes == timeline.peak_bytes


def test_a_link_table_holds_every_payload_and_any_bucket():
    graph = trace(every_kind, *EVERY_KIND)
    cost = TopologyCostModel(load_topology("cpu-gloo"))
    extracted = extract(graph, cost)
    problem = extracted.problem
    launches = [i for i, n in enumerate(problem.nodes) if n.kind == "launch"]
    for i in launches:
        assert problem.launch_us(i) == pytest.approx(cost.launch_us(extracted.nodes[i]))
        for payload in (1000, 3000, 10_000):
            node = problem.nodes[i]
            assert problem.link_us(node.group, node.op, payload) == pytest.approx(
                cost.link_us(extracted.nodes[i], [payload]), rel=0.02
            )


def test_a_write_stays_between_the_uses_before_and_after_it():
    def program(x, w):
        early = x + 1
        x.copy_(w)
        return early, x * 2

    extracted = extract(trace(program, [4], [4]), FixedCost())
    assert behind(extracted, "copy_") >= {"add"}
    assert behind(extracted, "mul") >= {"copy_"}


def test_a_launch_in_place_writes_until_its_wait():
    def program(x):
        y = x + 1
        reduced = wait(c10d.all_reduce_(y, "sum", "0"))
        return y * 2, reduced

    extracted = extract(trace(program, [4]), FixedCost())
    assert behind(extracted, "mul") >= {"wait_tensor"}


def test_a_launch_reads_until_its_wait():
    def program(x, y):
        whole = wait(c10d.all_gather_into_tensor(x[:2], RANKS, "0"))
        x.copy_(y)
        return whole

    extracted = extract(trace(program, [4], [4]), FixedCost())
    assert behind(extracted, "copy_") >= {"wait_tensor"}


def test_collective_stays_before_its_wait_beside_sends():
    from dynamo_dist.tracing import operators  # noqa: F401  (defines the operators)

    p2p = torch.ops.dynamo_dist

    def program(x, y):
        sent = p2p.isend(x, 1, 0, "0", 1)
        received = p2p.irecv(y, 1, 0, "0", 2)
        p2p.wait_tensor(sent, 3)
        return wait(received)

    extracted = extract(trace(program, [4], [4]), FixedCost(), ranks_differ=True)
    assert behind(extracted, "wait_tensor") >= {"irecv"}


def test_effects_are_barriers():
    library = torch.library.Library("test_extract", "FRAGMENT")
    library.define("note(Tensor x) -> ()")
    library.impl("note", lambda x: None, "Meta")

    def program(x):
        y = x + 1
        torch.ops.test_extract.note(x)
        torch._assert_async(x.sum() > 0)  # a check is none
        return (x * 2).relu() + y

    graph = trace(program, [4])
    extracted = extract(graph, FixedCost())
    assert [n.name for n in barriers(graph)] == ["note"]
    assert behind(extracted, "note") >= {"add"}
    assert behind(extracted, "mul") >= {"note"}
    library._destroy()


def test_random_operators_keep_their_order():
    def program(x):
        return torch.rand_like(x) + torch.rand_like(x)

    extracted = extract(trace(program, [4]), FixedCost())
    assert behind(extracted, "rand_like_1") >= {"rand_like"}


def test_order_holds_no_memory():
    """What only has to have run does not keep its value alive."""

    def program(x, w):
        big = x @ x
        y = big.sum()
        z = w + y
        x.copy_(w)
        return z

    graph = trace(program, [64, 64], [64, 64])
    problem = extract(graph, FixedCost()).problem
    assert (
        evaluate(problem, program_order(problem)).peak_bytes
        == simulate(graph, FixedCost()).peak_bytes
    )


def test_where_ranks_differ_launches_are_a_chain():
    extracted = extract(trace(gathers, *GATHERS), FixedCost(), ranks_differ=True, merge=())
    names = [n.name for n in extracted.problem.nodes if n.kind == "launch"]
    for first, second in itertools.pairwise(names):
        assert first in behind(extracted, second)
    assert len({n.merge_key for n in extracted.problem.nodes if n.kind == "launch"}) == len(names)


@pytest.mark.parametrize(
    "splits, differ",
    [([2] * RANKS, False), ([1, 2, 3, 2], True), ([0, 8, 0, 0], False)],
)
def test_uneven_exchanges_show_that_ranks_differ(splits, differ):
    def program(x):
        return wait(c10d.all_to_all_single(x, splits, splits, "0"))

    assert shows_that_ranks_differ(trace(program, [8])) is differ


def test_symbolic_sizes_show_that_ranks_may_differ():
    assert shows_that_ranks_differ(trace(gathers, *GATHERS, dynamic=True))


def test_every_result_of_a_coalesced_launch_waits_for_all_of_it():
    def program(a, b):
        return [wait(t) for t in c10d.all_reduce_coalesced([a, b], "sum", "0")]

    extracted = extract(trace(program, [8], [8]), FixedCost())
    assert behind(extracted, "wait_tensor_1") >= {"wait_tensor"}
    solution = solve(extracted.problem)
    check_schedule(extracted.problem, solution.schedule)
