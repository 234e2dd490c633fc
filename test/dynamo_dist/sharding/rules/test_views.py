"""A slice of all of a dimension, in graphs of sizes that are symbols."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.testing import fake_mesh

SLICES = {
    "all": lambda x: x[:] * 2,
    "half of another dimension": lambda x: x[:, : x.shape[1] // 2] * 2,
}


def launches(graph):
    return [node for node in graph.graph.nodes if "c10d" in str(node.target)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SLICES)
def test_a_dimension_that_stays_whole_stays_sharded(name, dynamic):
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    with fake_mesh(4) as mesh, dynamo_dist.enabled():
        x = distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)], src_data_rank=None)
        x.requires_grad_()
        backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=note)
        found = torch.compile(SLICES[name], backend=backend, dynamic=dynamic, fullgraph=True)(x)
        found.backward(torch.ones_like(found))
    assert found.placements == x.grad.placements == (Shard(0),)
    assert torch.equal(found.to_local(), SLICES[name](x.to_local()))
    assert len(graphs) == 2
    assert not any(launches(graph) for graph in graphs)
