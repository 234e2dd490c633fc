"""verify(): right models are right, planted errors are found with their operator and line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dynamo_dist
from dynamo_dist.errors import VerifyError
from dynamo_dist.numerics.ranks import all_ranks, split
from dynamo_dist.sharding import register_strategy, registration
from dynamo_dist.sharding.rows import strategy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    dynamo_dist.disable()
    registration.registered.clear()


def loss(x, y):
    return F.mse_loss(x * 2, y)


def test_verify_finds_upstreams_wrong_loss_and_ours_is_right():
    x = torch.arange(10.0).view(5, 2)
    with all_ranks(4) as mesh:
        inputs = [split(x, mesh, [Shard(0)], True), split(x + 1, mesh, [Shard(0)])]
        report = dynamo_dist.verify(loss, inputs)
        assert not report.ok
        assert "mse_loss" in report.first.op
        assert report.first.line.endswith("return F.mse_loss(x * 2, y)")
        assert set(report.differences) == {"output 0", "gradient of input 0"}
        with dynamo_dist.enabled():
            report = dynamo_dist.verify(loss, inputs)
        assert report.ok, str(report)
        assert str(report).startswith("right: ")


def doubling(call):
    """Says that the sine of a sum is the sum of sines."""
    return [call.row([Partial()], self=Partial())]


def misplaced(call):
    """Right numbers on each rank under a wrong name."""
    return [call.row([Replicate()], self=Shard(0))]


def unchecked(rows):
    decide = strategy(rows)
    return lambda schema: decide(schema)


@pytest.mark.parametrize(("rows", "placement"), [(doubling, Partial()), (misplaced, Shard(0))])
def test_planted_wrong_strategies_are_found(monkeypatch, rows, placement):
    from dynamo_dist.sharding import registration

    # Without the check of shapes that a registration makes, which finds one of them before.
    monkeypatch.setattr(registration, "_check_shapes", lambda *args: None)
    register_strategy(torch.ops.aten.sin.default)(unchecked(rows))
    with all_ranks(4) as mesh, dynamo_dist.enabled():
        x = split(torch.arange(8.0).view(4, 2), mesh, [placement], True)
        report = dynamo_dist.verify(torch.sin, [x])
    assert not report.ok
    assert report.first.op == "aten.sin.default"
    assert "first aten.sin.default on " in str(report)


def test_a_tensor_parallel_model():
    block = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x = torch.randn(4, 8)
    with all_ranks(4) as mesh, dynamo_dist.enabled():
        report = dynamo_dist.verify(
            parallelize_module(block, mesh, plan), [split(x, mesh, [Replicate()])]
        )
    assert report.ok, str(report)
    assert block.up.weight.grad is None


def test_nothing_distributed_is_refused():
    with pytest.raises(
        VerifyError, match=r"^verify\(\) got a model and inputs without a DTensor\."
    ):
        dynamo_dist.verify(Block(), [torch.ones(2, 8)])
