"""``torch.export`` of programs with meshes and placements: as upstream exports them, trackers or
not.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree

import dynamo_dist
from dynamo_dist.testing import fake_mesh


@pytest.fixture
def constants():
    """What upstream asks for before it exports a program that makes DTensors."""
    _pytree.register_constant(DTensorSpec)
    yield
    _pytree._deregister_pytree_node(DTensorSpec)
    _pytree.CONSTANT_NODES.discard(DTensorSpec)


class Squared(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.placement = mesh, Shard(0)

    def forward(self, x):
        made = DTensor.from_local(x, self.mesh, [self.placement])
        whole = (made * made).redistribute(placements=[Replicate()])
        return whole.to_local().chunk(self.mesh.size())[0]


def layers(mesh):
    parts = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return parallelize_module(parts, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def squares(mesh):
    return nn.Sequential(Squared(mesh), Squared(mesh))


@pytest.mark.parametrize(("make", "strict"), [(squares, True), (layers, True), (layers, False)])
def test_one_mesh_that_is_reached_in_two_ways(make, strict, constants):
    with fake_mesh(4) as mesh:
        module, x = make(mesh), torch.randn(4, 8)
        upstream = str(torch.export.export(module, (x,), strict=strict).graph)
        with dynamo_dist.enabled():
            assert str(torch.export.export(module, (x,), strict=strict).graph) == upstream
