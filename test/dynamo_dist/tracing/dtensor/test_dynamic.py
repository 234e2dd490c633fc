"""Dynamic sizes: forward and backward of what DTensor computes with them."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
        self.down = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        heads = (
            f(x).view(x.shape[0], x.shape[1], -1, 2).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*heads)
        return self.down(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


PLANS = {
    Block: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    Attention: {
        **{name: ColwiseParallel() for name in "qkv"},
        "down": RowwiseParallel(),
    },
}


@pytest.mark.parametrize("cls", PLANS)
def test_one_graph_serves_all_sizes(cls):
    with fake_mesh(8) as mesh:
        torch.manual_seed(0)
        module = parallelize_module(cls(), mesh, PLANS[cls], src_data_rank=None)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
        torch._dynamo.utils.counters.clear()
        for batch, length in ((2, 4), (3, 6), (5, 9)):
            x = torch.randn(batch, length, 16)
            expected, found = module(x), compiled(x)
            assert torch.allclose(expected, found, atol=1e-6)
            gradients = []
            for out in (expected, found):
                module.zero_grad()
                out.sum().backward()
                gradients.append([p.grad.to_local().clone() for p in module.parameters()])
            for a, b in zip(*gradients, strict=True):
                assert torch.allclose(a, b, atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lookup_in_sharded_rows_has_the_length_of_its_indices():
    """Upstream takes the number of ranks for it, where it was compiled for that."""
    with fake_mesh(8) as mesh:
        weight = distribute_tensor(torch.ones(32, 4), mesh, [Shard(0)], src_data_rank=None)

        def step(indices):
            here = DTensor.from_local(indices, mesh, [Replicate()])
            return F.embedding(here, weight).redistribute(placements=[Shard(1)]).to_local()

        compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
        for length in (8, 16, 11):
            indices = torch.zeros(2, length, dtype=torch.long)
            assert compiled(indices).shape == step(indices).shape == (2, -(-length // 8), 4)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_heads_stay_sharded_in_a_view_with_the_batch(requires_grad):
    """As attention by matrix products does: heads lie in the joined dimension once for each
    batch.
    """

    def joined(d):
        y = d.view(-1, d.shape[2], d.shape[3])
        return torch.bmm(y, y.transpose(1, 2)).view(d.shape[0], d.shape[1], d.shape[2], -1)

    with fake_mesh(4) as mesh:
        compiled = torch.compile(joined, backend="aot_eager", fullgraph=True, dynamic=True)
        for batch, length in ((2, 5), (3, 7)):
            x = torch.randn(batch, 8, length, 6)
            eager, traced = (
                distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_(
                    requires_grad
                )
                for _ in range(2)
            )
            expected, found = joined(eager), compiled(traced)
            assert found.placements == expected.placements == (Shard(1),)
            assert torch.equal(found.to_local(), expected.to_local())
            if requires_grad:
                expected.to_local().sum().backward()
                found.to_local().sum().backward()
                gradient = eager.grad.redistribute(placements=[Shard(1)]).to_local()
                assert torch.allclose(
                    gradient, traced.grad.redistribute(placements=[Shard(1)]).to_local()
                )


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
@pytest.mark.parametrize(
    "part", [lambda x: x.chunk(2, 1)[1], lambda x: x.split([2, 6], 1)[0], lambda x: x.cummax(0)[0]]
)
def test_backward_formulas_that_start_from_zeros(part, placements):
    """Autograd makes plain zeros for what nobody used, with the sizes of the whole."""
    with fake_mesh(2) as mesh:
        compiled = torch.compile(part, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (4, 6):
            given = torch.randn(rows, 8)
            eager, traced = (
                distribute_tensor(given, mesh, placements, src_data_rank=None).requires_grad_()
                for _ in range(2)
            )
            for function, x in ((part, eager), (compiled, traced)):
                (function(x).full_tensor() ** 2).sum().backward()
            assert traced.grad.shape == given.shape
            assert torch.equal(traced.grad.full_tensor(), eager.grad.full_tensor())
