"""Placements that do not fit are named with what was expected, in eager mode and compiled."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.errors import StrategyError
from dynamo_dist.testing import fake_mesh

MISFITS = {
    "two placements": ([Shard(0), Shard(1)], "2 placements, expected 1"),
    "none": ([], "0 placements, expected 1"),
    "a dimension too many": ([Shard(2)], "dimension 2 on mesh dimension 0, expected -2 to 1"),
    "a dimension too few": ([Shard(-3)], "dimension -3 on mesh dimension 0, expected -2 to 1"),
    "no placement": (["rows"], "'rows' on mesh dimension 0 is no placement"),
}


@pytest.fixture
def x():
    with dynamo_dist.enabled(), fake_mesh(4) as mesh:
        yield distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None)


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_refused(x, name):
    placements, said = MISFITS[name]
    with pytest.raises(StrategyError, match=said):
        x.redistribute(placements=placements)


def test_compiled_it_is_refused_too(x):
    step = torch.compile(
        lambda x: x.redistribute(placements=[Shard(2)]), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="expected -2 to 1"):
        step(x)


def test_what_fits_is_done(x):
    for placement in (Shard(-1), Replicate(), Shard(1)):
        assert x.redistribute(placements=[placement]).shape == (8, 6)
    assert x.redistribute(x.device_mesh, [Replicate()], async_op=True).to_local().shape == (8, 6)
