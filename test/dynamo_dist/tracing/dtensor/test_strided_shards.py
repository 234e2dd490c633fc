"""Views that merge sharded dimensions leave strided shards; compiled they are eager's."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.usefixtures("enabled")

PROGRAMS = {
    "merged": lambda d: (d * 1).view(-1, 8),
    "merged and used": lambda d: (d * 1).view(-1, 8) * 2,
    "merged and split again": lambda d: ((d * 1).view(-1, 8) + 1).view(4, 8, 8),
    "merged, an output of an input": lambda d: d.view(-1, 8),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_placements(mesh, name, requires_grad):
    torch.manual_seed(0)
    full = torch.randn(4, 8, 8)
    eager, traced = (
        distribute_tensor(full, mesh, (Shard(0), Shard(1)), src_data_rank=None).requires_grad_(
            requires_grad
        )
        for _ in range(2)
    )
    program = PROGRAMS[name]
    expected = program(eager)
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(traced)
    assert (found.placements, found.shape) == (expected.placements, expected.shape)
    assert torch.equal(found._local_tensor, expected._local_tensor)
    assert found._spec.shard_order == expected._spec.shard_order
    if requires_grad:
        for out in (expected, found):
            (out * out).sum().full_tensor().backward()
        assert torch.equal(eager.grad.full_tensor(), traced.grad.full_tensor())
