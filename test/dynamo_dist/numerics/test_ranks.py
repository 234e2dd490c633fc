"""split and join: what placements mean, written without DTensor's redistribution."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_dist.numerics.ranks import LayoutError, all_ranks, split, whole_tensor
from dynamo_dist.torch_compat import dtensor_ranks, dtensor_specs

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize(
    "placements", [(S0, S0), (S0, S1), (S1, S0), (R, S0), (P, S1), (P, P), (R, P)]
)
def test_join_undoes_split(placements, rows):
    x = torch.randn(rows, 3, dtype=torch.float64)
    with all_ranks(2, 2) as mesh:
        found = split(x, mesh, placements)
        assert torch.allclose(whole_tensor(found), x)
        # The same as what torch's own collectives give.
        assert torch.allclose(_torch_full(found), x)


def _torch_full(tensor):
    return tensor.full_tensor().reconcile()


def test_summands_differ_and_infinities_stay():
    with all_ranks(4) as mesh:
        parts = split(torch.ones(2), mesh, [P])._local_tensor._local_tensors
        assert len({part[0].item() for part in parts.values()}) == 4
        assert whole_tensor(split(torch.tensor([torch.inf, 1.0]), mesh, [P])).tolist() == [
            torch.inf,
            1.0,
        ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_summands_add_up_exactly_in_the_order_of_ranks(size):
    x = torch.randn(50)
    with all_ranks(size) as mesh:
        found = split(x, mesh, [P])
        parts = [part for _, part in sorted(found._local_tensor._local_tensors.items())]
        whole = found.redistribute(placements=[R]).to_local().reconcile()
    assert torch.equal(sum(parts[1:], start=parts[0]), x)
    assert torch.equal(whole, x)


def broken(mesh, parts, placement, shape):
    like = torch.empty(shape)
    local = dtensor_specs.LocalTensor(dict(enumerate(parts)))
    return dtensor_ranks.dtensor_of_ranks(local, mesh, [placement], like, False)


def test_replicas_that_differ():
    with all_ranks(2) as mesh:
        tensor = broken(mesh, [torch.ones(2), torch.zeros(2)], R, (2,))
        with pytest.raises(LayoutError, match=r"^replicas 0 and 1 differ$"):
            whole_tensor(tensor)


def test_a_local_shape_that_does_not_fit():
    with all_ranks(2) as mesh:
        tensor = broken(mesh, [torch.ones(2), torch.ones(2)], S0, (3,))
        with pytest.raises(LayoutError) as caught:
            whole_tensor(tensor)
    assert str(caught.value) == (
        "rank 1 holds local shape (2,), expected (1,): global shape (3,) in (Shard(dim=0),)"
    )
