"""Collectives of c10d on DTensors: never a result that is dropped, never one that is not the
whole's.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dynamo_dist.errors import StrategyError
from dynamo_dist.numerics.ranks import split, whole_tensor
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat import dtensor_specs

pytestmark = pytest.mark.usefixtures("enabled")

X = torch.arange(8.0).view(4, 2)


@pytest.fixture
def beside(grid):
    """The mesh of one dimension, and the group along the other; all four ranks are in this
    process.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"].get_group()


def held(mesh, placement):
    """A DTensor of which ranks 0 and 2 hold the halves, or the summands, and 1 and 3 those of
    another.
    """
    local = split(X, init_device_mesh("cpu", (2, 2)), [placement, Replicate()])._local_tensor
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=X.shape, stride=X.stride()
    )


WRITING = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "all_reduce, asynchronous": lambda x, group: dist.all_reduce(
        x, group=group, async_op=True
    ).wait(),
    "all_reduce_coalesced": lambda x, group: dist.all_reduce_coalesced([x], group=group),
}


@pytest.mark.parametrize("call", WRITING)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_a_group_beside_the_mesh_sums_what_its_ranks_hold(beside, call, placement):
    mesh, group = beside
    x = held(mesh, placement)
    local = x._local_tensor
    WRITING[call](x, group)
    assert x._local_tensor is local and x.placements == (placement,)
    whole = DTensor.from_local(local, init_device_mesh("cpu", (2, 2)), [placement, Replicate()])
    assert torch.equal(whole_tensor(whole), 2 * X)


def test_what_is_returned_is_laid_out_as_what_was_given(beside):
    mesh, group = beside
    found = functional.all_reduce(held(mesh, Shard(0)), "sum", group)
    assert found.placements == (Shard(0),) and found.shape == X.shape
    assert torch.equal(join_of(found), 2 * X)


def join_of(found):
    local = torch.ops._c10d_functional.wait_tensor(found)._local_tensor
    grid = init_device_mesh("cpu", (2, 2))
    return whole_tensor(
        DTensor.from_local(local, grid, [*found.placements, Replicate()], run_check=False)
    )


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_a_group_of_the_mesh_is_refused(ranks, placement):
    x = split(X, ranks, [placement])
    for call in WRITING.values():
        with pytest.raises(StrategyError, match="cannot run on a DTensor in"):
            call(x, ranks.get_group())
    with pytest.raises(StrategyError, match=r"c10d.broadcast_.default cannot run on a DTensor"):
        dist.broadcast(x, 0)
    with pytest.raises(StrategyError, match=r"_c10d_functional.all_reduce.default cannot run"):
        functional.all_reduce(x, "sum", ranks.get_group())
    assert torch.equal(whole_tensor(x), X)


def test_the_largest_of_pending_sums_is_refused(beside):
    mesh, group = beside
    dist.all_reduce(held(mesh, Shard(0)), dist.ReduceOp.MAX, group)
    with pytest.raises(StrategyError, match="with max, of which no part is known yet"):
        dist.all_reduce(held(mesh, Partial()), dist.ReduceOp.MAX, group)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("c10d.send", lambda x: dist.send(x, 1)),
        (
            "_c10d_functional.all_gather_into_tensor",
            lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD),
        ),
        (
            "_c10d_functional.reduce_scatter_tensor",
            lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
        ),
    ],
)
def test_other_collectives_are_refused(ranks, name, call):
    with pytest.raises(StrategyError, match=f"{name}.default has no sharding strategy for"):
        call(split(X, ranks, [Shard(0)]))


def test_gradients_summed_over_the_group_beside_by_a_hook(beside):
    """As plans do for a norm between sharded layers, whose gradient is a part of the sum on each
    rank.
    """
    mesh, group = beside
    weight = torch.nn.Parameter(held(mesh, Shard(0)))
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
    (weight * weight).sum().backward()
    grid = init_device_mesh("cpu", (2, 2))
    found = DTensor.from_local(weight.grad.to_local(), grid, [Shard(0), Replicate()])
    assert torch.equal(whole_tensor(found), 4 * X)


def test_which_groups_are_beside():
    with fake_mesh(2, 2, 2, names=("dp", "cp", "tp")) as mesh:
        ranks = {
            name: tuple(dist.get_process_group_ranks(mesh[name].get_group()))
            for name in ("dp", "cp", "tp")
        }
        assert dtensor_specs.is_beside(mesh["dp"], ranks["tp"])
        assert dtensor_specs.is_beside(mesh["dp", "cp"], ranks["tp"])
        assert not dtensor_specs.is_beside(mesh["dp", "cp"], ranks["cp"])
        assert not dtensor_specs.is_beside(mesh["dp"], tuple(range(8)))
        assert not dtensor_specs.is_beside(mesh["dp"], (0, 5))  # another place of the mesh
        assert not dtensor_specs.is_beside(init_device_mesh("cpu", (8,)), ranks["tp"])
