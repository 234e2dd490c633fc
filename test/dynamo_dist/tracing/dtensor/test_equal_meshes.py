"""Programs on meshes that are equal and not one object."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dynamo_dist
from inductor_passes.testing import fake_group


def drawn(mesh):
    whole = torch.arange(16.0).view(4, 4)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).requires_grad_()


def program(x):
    return (x * 3).sin()


@pytest.mark.parametrize("backend", ["aot_eager", "dynamo_dist"])
def test_trained_after_a_program_on_an_equal_mesh(backend):
    with fake_group(2), dynamo_dist.enabled():
        one, other = (init_device_mesh("cpu", (2,)) for _ in range(2))
        program(drawn(one))  # sharding decisions are kept with this mesh
        x = drawn(other)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        with torch._inductor.config.patch(fallback_by_default=True):
            out = compiled(x)
        out.to_local().sum().backward()
        assert torch.equal(out.to_local(), program(x).to_local())
        torch.testing.assert_close(x.grad.to_local(), 3 * (3 * x.detach().to_local()).cos())
