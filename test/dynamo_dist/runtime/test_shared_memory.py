"""A DTensor and a plain tensor of the same memory: written by a graph that is given both."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import dynamo_dist
from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def run(program):
    """The DTensor behind it; its local tensor is given beside it."""
    torch._dynamo.reset()
    with fake_mesh(2) as mesh, torch.no_grad():
        local = torch.ones(4)
        placed = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        torch.compile(program, backend="dynamo_dist", fullgraph=True)(placed, local)
    return local


def of_the_plain(placed, local):
    local.add_(1)
    return placed + 1


def of_the_dtensor(placed, local):
    placed += 1
    return local * 2


def of_a_view(placed, local):
    local[1:].mul_(2)
    return placed + 1


def of_something_else(placed, local):
    fresh = local * 2
    fresh += 1
    return placed + 1, fresh


@pytest.mark.parametrize("program", [of_the_plain, of_the_dtensor, of_a_view])
def test_a_write_is_refused(program):
    with pytest.raises(Exception, match="a DTensor and a plain tensor of the same memory") as error:
        run(program)
    assert "x.to_local()" in str(error.value)
    assert dynamo_dist.is_enabled()


def test_a_write_to_other_memory_is_none():
    assert run(of_something_else).tolist() == [1, 1, 1, 1]
