"""Gradients of ``torch.distributed.nn.functional``, found by random programs."""

import pytest
import torch
import torch.distributed.nn.functional as dnf

import dynamo_dist
from dynamo_dist.testing import fake_mesh


@pytest.mark.xfail(
    strict=True,
    raises=torch._dynamo.exc.Unsupported,
    reason="its backward applies another autograd function, whose ctx.group = group is not traced",
)
def test_all_gather_has_a_gradient():
    def step(x, mesh):
        return torch.cat(dnf.all_gather(x * 1, group=mesh.get_group(0)))

    torch._dynamo.reset()
    with fake_mesh(2) as mesh, dynamo_dist.enabled():
        x = torch.ones(4, 3, requires_grad=True)
        torch.compile(step, backend="aot_eager", fullgraph=True)(x, mesh).sum().backward()
    assert x.grad is not None
