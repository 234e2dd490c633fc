"""Regions that are compiled once, with DTensors in them."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def mesh():
    with fake_mesh(2) as made:
        yield made


def laid_out(mesh, placement, *shape):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None)


def test_local_map_inside(mesh):
    mapped = local_map(lambda a: a * 2, [Shard(0)], ([Shard(0)],), device_mesh=mesh)
    region = torch.compiler.nested_compile_region(lambda x: mapped(x) + 1)
    x = laid_out(mesh, Shard(0), 4, 2)
    found = torch.compile(lambda x: region(region(x)), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found.to_local(), 4 * x.to_local() + 3)


def test_a_product_that_is_pending(mesh):
    region = torch.compiler.nested_compile_region(lambda x, w: x @ w)
    x, w = laid_out(mesh, Shard(1), 2, 4), laid_out(mesh, Shard(0), 4, 2)
    found = torch.compile(region, backend="aot_eager", fullgraph=True)(x, w)
    assert found.placements == (Partial(),)
    assert torch.equal(found.to_local(), x.to_local() @ w.to_local())


def test_plain_tensors_stay_upstreams(mesh, compiled):
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    function, graphs = compiled(lambda x: region(x) * 2)
    function(torch.ones(2))
    assert hasattr(graphs[0], "subgraph_0")


def test_parameters_that_are_dtensors(mesh):
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight = torch.nn.Parameter(laid_out(mesh, Replicate(), 2, 2))
    region = torch.compiler.nested_compile_region(module)
    x = laid_out(mesh, Shard(0), 4, 2)
    found = torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found.to_local(), x.to_local() @ module.weight.to_local().t())
