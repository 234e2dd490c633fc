"""An optimizer made before ``fully_shard`` is named once; those made after it, or of others, are
not.
"""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def mesh():
    with fake_mesh(4) as made:
        yield made


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def said(model, caplog, steps=1):
    """What a forward of the compiled model warns of optimizers."""
    function = torch.compile(model, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, "dynamo_dist"):
        for _ in range(steps):
            function(torch.ones(2, 8)).sum().backward()
    return [r.getMessage() for r in caplog.records if "made before fully_shard" in r.getMessage()]


@pytest.mark.parametrize("groups", [False, True])
def test_one_made_before(mesh, caplog, groups):
    model = net()
    params = list(model.parameters())
    given = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.1}] if groups else params
    optimizer = torch.optim.AdamW(given)
    (text,) = said(fully_shard(model, mesh=mesh), caplog, steps=2)
    assert (
        "AdamW holds 4 parameters that no module has, in the shapes of those of Sequential" in text
    )
    assert "AdamW(model.parameters(), ...)" in text
    del optimizer


def test_one_of_half_of_them(mesh, caplog):
    model = net()
    optimizer = torch.optim.SGD([each.weight for each in model])
    assert len(said(fully_shard(model, mesh=mesh), caplog)) == 1
    del optimizer


def made_afterwards(model, mesh):
    return torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters())


def gathered_since(model, mesh):
    """The modules hold gathered parameters while the optimizer holds the shards."""
    optimizer = torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters())
    model.unshard()
    return optimizer


def of_another_model(model, mesh):
    fully_shard(model, mesh=mesh)
    other = net()
    return torch.optim.AdamW(other.parameters()), other


def of_a_tensor_of_its_own(model, mesh):
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW([nn.Parameter(torch.ones(8, 8))])


@pytest.mark.parametrize(
    "make", [made_afterwards, gathered_since, of_another_model, of_a_tensor_of_its_own]
)
def test_others_are_not(mesh, caplog, make):
    model = net()
    kept = make(model, mesh)
    assert not said(model, caplog)
    del kept
