"""Instances of classes that derive from DTensor."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


class Named(DTensor):
    pass


def test_left_to_eager_mode_with_a_reason():
    with fake_mesh(2) as mesh:
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
        named = Named(x._local_tensor, x._spec, requires_grad=False)
        found = torch.compile(lambda x: x * 2, backend="aot_eager")(named)
        assert torch.equal(found.to_local(), torch.full((2, 2), 2.0))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Tensor of a subclass of DTensor"):
            torch.compile(lambda x: x * 3, backend="aot_eager", fullgraph=True)(named)
