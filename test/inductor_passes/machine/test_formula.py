"""A formula of one trace says what a trace at other sizes, or on more ranks, says."""

import pytest
import torch
import torch.distributed as dist

from inductor_passes.errors import OptionError
from inductor_passes.graph.collectives import launches
from inductor_passes.machine import TopologyCostModel, load_topology
from inductor_passes.machine.formula import GraphCosts, StepFormula
from inductor_passes.testing import fake_group, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
H100 = load_topology("h100x8")


def block(x):
    """[batch, sequence, 1024]"""
    q = x.view(x.shape[0], x.shape[1], 8, 128).transpose(1, 2)
    out = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]
    return torch.softmax(out.transpose(1, 2).reshape(x.shape) @ x.transpose(1, 2), -1).sum(-1)


def compute(graph):
    model = TopologyCostModel(H100)
    return sum(model.compute_us(node) for node in graph.nodes)


@pytest.mark.parametrize(("batch", "sequence"), [(4, 256), (8, 4096), (64, 1024)])
def test_other_sizes(batch, sequence):
    costs = GraphCosts.of(trace(block, [4, 256, 1024], dynamic=True), H100)
    formula = StepFormula.of([costs], H100)
    names = {hint: name for name, hint in formula.traced.items()}
    found = formula.at(**{names[4]: batch, names[256]: sequence}).compute_us
    expected = compute(trace(block, [batch, sequence, 1024], device="meta"))
    # How many splits a long reduction has is decided at the traced sizes.
    assert found == pytest.approx(expected, rel=0.02)


def step(world, stride):
    """Weights gathered over all ranks ``stride`` apart, gradients scattered, tokens exchanged in a node."""
    data = dist.new_group(list(range(0, world, stride)))
    size = data.size()
    node = dist.new_group(list(range(8)))

    def run(x, shard):
        weight = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, size, data.group_name))
        y = c10d.wait_tensor(
            c10d.all_to_all_single(x @ weight, [64] * 8, [64] * 8, node.group_name)
        )
        total = c10d.wait_tensor(c10d.all_reduce(y.sum(), "sum", data.group_name))
        return total, c10d.wait_tensor(
            c10d.reduce_scatter_tensor(x.t() @ y, "sum", size, data.group_name)
        )

    return trace(run, [512, 4096], [4096 // size, 4096])


def link(graph):
    model = TopologyCostModel(H100)
    return sum(model.launch_us(launch) for launch in launches(graph))


@pytest.mark.parametrize(
    ("traced", "asked", "stride"),
    [
        (64, 8, 1),
        (64, 8, 2),
        *((*worlds, s) for worlds in ((64, 512), (512, 64)) for s in (1, 2, 8)),
    ],
)
def test_other_numbers_of_ranks(traced, asked, stride):
    with fake_group(traced):
        formula = StepFormula.of([GraphCosts.of(step(traced, stride), H100)], H100)
    with fake_group(asked):
        graph = step(asked, stride)
        expected_link, expected_compute = link(graph), compute(graph)
    found = formula.at(n=asked // stride)
    assert sum(found.link_us.values()) == pytest.approx(expected_link)
    assert found.compute_us == pytest.approx(expected_compute)
    assert found.at_least_us < found.at_most_us


def exchange_and_gather(world):
    """Replicas of each of eight experts: their groups grow with the job."""
    replicas = dist.new_group(list(range(0, world, 8)))

    def run(x, shard):
        both = c10d.wait_tensor(
            c10d.all_gather_into_tensor(shard, replicas.size(), replicas.group_name)
        )
        return both, c10d.wait_tensor(c10d.all_reduce(x, "sum", dist.group.WORLD.group_name))

    return trace(run, [1024, 1024], [2**20 // replicas.size()])


def test_groups_grow_together():
    with fake_group(64):
        costs = GraphCosts.of(exchange_and_gather(64), H100)
    formula = StepFormula.of([costs], H100, [range(64), range(0, 64, 8)])
    with fake_group(1024):
        expected = link(exchange_and_gather(1024))
    assert sum(formula.at(n=1024).link_us.values()) == pytest.approx(expected)


def test_what_is_not_there_is_named():
    with fake_group(8):
        costs = GraphCosts.of(step(8, 1), H100)
    with pytest.raises(OptionError, match="Its symbols are n"):
        StepFormula.of([costs], H100).at(batch=3)
    with pytest.raises(OptionError, match=r"Groups are 0, 1, \.\.\., 7"):
        StepFormula.of([costs], H100, [[0, 2]])
