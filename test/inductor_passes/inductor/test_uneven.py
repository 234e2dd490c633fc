import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from inductor_passes.inductor.local_graphs import is_uneven
from inductor_passes.testing import fake_group


@pytest.mark.parametrize(
    "shape, placements, uneven",
    [
        ((130, 4), [Shard(0), Replicate()], True),
        ((132, 4), [Shard(0), Replicate()], False),
        ((132, 4), [Shard(0), Shard(0)], True),  # 132 over 8
        ((136, 4), [Shard(0), Shard(-2)], False),
        ((130, 4), [Replicate(), Replicate()], False),
        ((130, 4), [Replicate(), Shard(0)], False),
    ],
)
def test_global_shapes_say_whether_shards_differ(shape, placements, uneven):
    for rank in (0, 7):
        with fake_group(8, rank):
            mesh = init_device_mesh("cpu", (4, 2))
            local = torch.empty(1, 1)
            value = DTensor.from_local(
                local,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=(shape[1], 1),
            )
            assert is_uneven(value) is uneven


def test_plain_tensors_have_no_shards():
    assert not is_uneven(torch.ones(3))
