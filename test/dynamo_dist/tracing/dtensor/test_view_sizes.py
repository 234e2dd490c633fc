"""Views of DTensors that come into a graph with dynamic sizes, made of several of their base's."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")
LENGTHS = (8, 8, 12, 16)


def of_length(mesh, rows, placement, *, grad=False):
    # Fake ranks send nothing: each cuts its own part.
    whole = torch.arange(rows * 24.0).view(rows, 6, 4) / 7
    made = distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None)
    return made.detach().requires_grad_(grad)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replica"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1),
        lambda x: x.flatten(1),
        lambda x: x.view(x.shape[0] * 6, 4),
        lambda x: x.view(-1).view(-1, 24),
    ],
)
def test_one_graph_for_all_lengths(mesh, placement, view):
    def scaled(p):
        return p.sin() * p.shape[0]

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(
        scaled, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=True
    )
    for rows in LENGTHS:
        p = view(of_length(mesh, rows, placement))
        assert_close(run(p).to_local(), scaled(p).to_local())
    assert len(graphs) <= 2
    for graph in graphs:
        assert unknown_sizes(graph) == set()


def unknown_sizes(graph):
    """Symbols of the graph that no input is: neither a number nor a size of a tensor."""
    known, used = set(), set()
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                used |= size.node.expr.free_symbols
                known |= {size.node.expr} if size.node.expr.is_symbol else set()
    return used - known


def test_written_and_with_gradients(mesh):
    def step(p, g):
        scale = p.detach().view(-1, 6).abs().amax(-1, keepdim=True)
        p.lerp_(g / scale.view(-1)[0], 0.1)
        return scale

    run = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in LENGTHS:
        found = []
        for each in (step, run):
            x, g = (of_length(mesh, rows, Shard(0)) for _ in range(2))
            found.append((each(x.view(-1), g.view(-1)).to_local(), x.to_local()))
        assert_close(*found)

    run = torch.compile(lambda p: p.sin(), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in LENGTHS:
        x = of_length(mesh, rows, Shard(0), grad=True)
        run(x.view(-1)).to_local().sum().backward()
        assert_close(x.grad.to_local(), x.detach().to_local().cos())
