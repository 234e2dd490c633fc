"""Regions that are compiled once, with DTensors in them."""

import pytest
import torch
from fuzzing.without_cpp import without_cpp
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


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def test_gradients_of_regions_are_eager_modes():
    # Upstream's Inductor uses the memory of ``x`` again while the region's backward needs it.
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([Mlp(), Mlp(), Mlp()])

    def loss_of(x):
        for layer in layers:
            x = (x + layer(torch.nn.functional.layer_norm(x, (4,)))).sin()
        return x.sum()

    x = torch.randn(2, 3, 4)
    expected = torch.autograd.grad(loss_of(x), layers.parameters())
    with without_cpp():
        loss = torch.compile(loss_of, backend="dynamo_dist", fullgraph=True)(x)
        found = torch.autograd.grad(loss, layers.parameters())
    torch.testing.assert_close(found, expected)


def test_parameters_that_are_dtensors(mesh):
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight = torch.nn.Parameter(laid_out(mesh, Replicate(), 2, 2))
    x = laid_out(mesh, Shard(0), 4, 2)
    region = torch.compiler.nested_compile_region
    of_method = region(lambda self, x: torch.nn.Linear.forward(self, x))
    for function in (region(module), lambda x: of_method(module, x)):
        call = torch.compile(lambda x, f=function: f(x), backend="aot_eager", fullgraph=True)
        assert torch.equal(call(x).to_local(), x.to_local() @ module.weight.to_local().t())
