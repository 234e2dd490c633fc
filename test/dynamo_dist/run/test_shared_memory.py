"""A DTensor and its local tensor given to one compiled function."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.errors import DTensorError
from inductor_passes.testing import fake_group


@pytest.fixture
def x():
    with fake_group(2), dynamo_dist.enabled():
        mesh = init_device_mesh("cpu", (2,))
        yield distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)


def compiled(function):
    return torch.compile(function, backend="dynamo_dist", fullgraph=True)


def writing(x, local):
    local.add_(1)
    return x * 2


def reading(x, local):
    return x * 2, local + 1


def test_written_is_refused(x):
    with pytest.raises(Exception, match="of the same memory") as caught:
        compiled(writing)(x, x._local_tensor)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), DTensorError)


def test_read_is_fine(x):
    with torch._inductor.config.patch(fallback_by_default=True):
        one, other = compiled(reading)(x, x._local_tensor)
    assert torch.equal(one.to_local(), other)


def test_other_memory_is_fine(x):
    with torch._inductor.config.patch(fallback_by_default=True):
        found = compiled(writing)(x, torch.zeros(2, 2))
    assert torch.equal(found.to_local(), torch.full((2, 2), 2.0))
