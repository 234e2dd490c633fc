"""Strided shards, as weights under tensor and data parallelism have them: what treats each
element alone stays.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from dynamo_dist.numerics.ranks import whole_tensor
from dynamo_dist.sharding import register_rows, registration
from dynamo_dist.torch_compat.dtensor_specs import LocalTensor

RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]
UPDATES = {
    "mul_": lambda x, y: x.mul_(0.5),
    "div_": lambda x, y: x.div_(y.exp()),
    "add_": lambda x, y: x.add_(y, alpha=2.0),
    "sub_": lambda x, y: x.sub_(1.0),
    "fill_": lambda x, y: x.fill_(3.0),
    "hardswish backward": lambda x, y: torch.ops.aten.hardswish_backward(x, y),
    "largest": lambda x, y: torch.linalg.vector_norm(x, float("inf"), 1),
}


def drawn(rows):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))


def strided(tensor, mesh):
    """Split over the inner mesh dimension first, and each part over the outer one."""
    parts = {2 * outer + inner: tensor.chunk(2)[inner].chunk(2)[outer] for outer, inner in RANKS}
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(
        LocalTensor({rank: part.clone() for rank, part in parts.items()}),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("name", UPDATES)
def test_what_treats_each_element_alone_launches_nothing(grid, name):
    x, y = drawn(12), drawn(8).repeat(2, 1)[:12].contiguous()
    expected = UPDATES[name](x.clone(), y)
    mine, other = strided(x, grid), strided(y, grid)
    with CommDebugMode() as launched:
        result = UPDATES[name](mine, other)
    assert result.placements == mine.placements
    assert launched.get_total_counts() == 0
    torch.testing.assert_close(whole_tensor(result), expected)


@pytest.mark.usefixtures("enabled")
def test_what_is_whole_elsewhere_is_cut_alike(grid):
    x, y = drawn(12), drawn(8).repeat(2, 1)[:12].contiguous()
    mine, other = strided(x, grid), distribute_tensor(y, grid, [Replicate(), Replicate()])
    torch.testing.assert_close(whole_tensor(mine.add_(other)), x + y)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("any_part", [True, False])
def test_rows_of_anothers_operator(grid, any_part):
    sin = torch.ops.aten.sin.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "registered", {})
        register_rows(sin, lambda call: [call.row([Shard(0)], self=Shard(0))], any_part=any_part)
    x = drawn(12)
    mine = strided(x, grid)
    with CommDebugMode() as launched:
        result = mine.sin()
    assert (launched.get_total_counts() == 0) == any_part
    assert (result.placements == mine.placements) == any_part
    torch.testing.assert_close(whole_tensor(result), x.sin())
