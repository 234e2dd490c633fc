"""Everyone who asks what work takes gets the same answer: planner, scheduler, simulator,
imports.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.planning.cost import Costs, TopologyPrices
from dynamo_dist.planning.planner import record
from dynamo_dist.program import upstream_choice
from dynamo_dist.testing import fake_mesh
from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.cost.collectives import shape_of_ranks
from inductor_passes.cost.importing import product_us
from inductor_passes.cost.machine import Machine
from inductor_passes.cost.topology import MeasuredProducts
from inductor_passes.schedule.extract import extract
from inductor_passes.simulate import simulate
from inductor_passes.testing import trace

RANKS = 4
PLAIN = load_topology("h100x8")
MEASURED = dataclasses.replace(
    PLAIN,
    products=(
        MeasuredProducts.of("bfloat16", {(1, 64, 64, 64): 1.9, (1, 2048, 2048, 2048): 30.0}),
    ),
)


def mlp(x, w):
    return F.gelu(x @ w) * x


def norm(x):
    return (x - x.mean(-1, keepdim=True)) * 0.5 + x


PROGRAMS = {
    "mm": (torch.mm, "square square"),
    "bmm": (torch.bmm, "cube cube"),
    "addmm": (torch.addmm, "square square square"),
    "pointwise": (torch.sin, "square"),
    "fused": (lambda x: (x.sin() * 2 + x).relu(), "square"),
    "reduction": (lambda x: x.sum(-1), "square"),
    "norm": (norm, "square"),
    "view": (lambda x: x.t() + 1, "square"),
    "mlp": (mlp, "square square"),
    "two results": (lambda x: (x.exp(), x @ x), "square"),
}
SHAPES = {"square": lambda n: (n, n), "cube": lambda n: (4, n, n)}


def recorded(fn, inputs, placement=Replicate()):
    """The program of the forward, on a mesh of four."""
    programs = []

    def backend(gm, given):
        programs.append(record(gm, given).program)
        return gm.forward

    torch.compiler.reset()
    with fake_mesh(RANKS) as mesh:
        spread = [DTensor.from_local(t, mesh, [placement], run_check=False) for t in inputs]
        torch.compile(fn, backend=backend, fullgraph=True)(*spread)
    (program,) = programs
    return program


def planned_us(fn, inputs, topology, placement=Replicate()):
    """What the planner makes of the forward on one rank."""
    program = recorded(fn, inputs, placement)
    costs = Costs(program, TopologyPrices(topology, RANKS))
    return sum(costs.compute_us(i, upstream_choice(step)) for i, step in enumerate(program.steps))


@pytest.mark.parametrize("topology", [PLAIN, MEASURED], ids=["formulas", "measured"])
@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_who_ask_for_compute_get_one_answer(name, size, topology):
    fn, kinds = PROGRAMS[name]
    shapes = [SHAPES[kind](size) for kind in kinds.split()]
    graph = trace(fn, *shapes, dtype=torch.bfloat16)
    cost = TopologyCostModel(topology)
    simulated = simulate(graph, cost).compute_us
    scheduled = sum(node.us for node in extract(graph, cost).problem.nodes)
    inputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    assert scheduled == pytest.approx(simulated)
    assert planned_us(fn, inputs, topology) == pytest.approx(simulated)


@pytest.mark.parametrize("topology", [PLAIN, MEASURED], ids=["formulas", "measured"])
@pytest.mark.parametrize("size", [64, 512, 2048])
def test_product_cost_is_what_imports_compare_with(size, topology):
    graph = trace(torch.mm, (size, size), (size, size), dtype=torch.bfloat16)
    expected = product_us(topology, "bfloat16", (1, size, size, size))
    assert simulate(graph, TopologyCostModel(topology)).compute_us == pytest.approx(expected)


def test_shards_are_priced_as_the_smaller_work_that_they_are():
    rows = [torch.zeros(512, 256, dtype=torch.bfloat16)]
    local = trace(torch.sin, (512, 256), dtype=torch.bfloat16)
    alone = simulate(local, TopologyCostModel(PLAIN)).compute_us
    assert planned_us(torch.sin, rows, PLAIN, Shard(0)) == pytest.approx(alone)


def test_all_who_ask_for_a_collective_get_one_answer():
    def gathered(x):
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, "0"))

    graph = trace(gathered, (1024, 64), dtype=torch.bfloat16)
    launch = next(n for n in graph.nodes if "all_gather" in str(n.target))
    shape = shape_of_ranks(range(8), PLAIN.ranks_per_node, 8)
    expected = Machine(PLAIN).call_us("all_gather", [1024 * 64 * 2], shape)
    problem = extract(graph, TopologyCostModel(PLAIN)).problem
    (number,) = [i for i, node in enumerate(problem.nodes) if node.kind == "launch"]
    assert problem.launch_us(number) == pytest.approx(expected)
    assert TopologyCostModel(PLAIN).launch_us(launch) == pytest.approx(expected)
    planner = TopologyPrices(PLAIN, 8)
    assert planner.collective_us("all_gather", 1024 * 64 * 2, range(8)) == pytest.approx(expected)


def test_what_moves_in_between_is_written_and_read():
    """Pointwise steps are one kernel; moved apart they cost a write and a read more."""
    program = recorded(lambda x: x.sin().cos().exp(), [torch.zeros(512, 512)], Shard(0))
    first, second, third = (i for i, step in enumerate(program.steps) if step.kind == "op")
    assert program.access(first).writes == program.access(second).writes == (0.0,)
    assert program.access(second).reads == program.access(third).reads == (0.0,)
    costs = Costs(program, TopologyPrices(PLAIN, RANKS))
    size = 512 * 512 * 4
    for after in (second, third):
        moved = costs.apart_us(after, 0, ("S0",), ("R",))
        assert moved == pytest.approx(Machine(PLAIN).memory_us(size + RANKS * size))
    assert costs.apart_us(first, 0, ("S0",), ("R",)) == 0.0


@pytest.mark.usefixtures("enabled")
def test_a_factor_is_planned_like_any_product():
    """Autograd's own ``mul.Scalar`` is answered by a handler, which only calls ``mul.Tensor``."""
    x = torch.zeros(16, 16)
    programs = recorded(lambda x: torch.ops.aten.mul.Scalar(x, -0.5), [x], Shard(0))
    (step,) = [step for step in programs.steps if step.kind == "op"]
    assert step.text.startswith("aten.mul.Tensor") and not step.fixed
