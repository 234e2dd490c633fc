"""``dynamo_dist.compare`` for real: one process, and two gloo ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dynamo_dist
from dynamo_dist.errors import CompareError
from dynamo_dist.numerics import comparison
from inductor_passes.testing import fake_group

pytestmark = pytest.mark.slow


def test_two_ranks_agree_on_the_verdict(on_ranks):
    on_ranks(Path(__file__).with_name("compare_worker.py"), ranks=2)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, scale=1.0):
        return {"y": self.norm(self.linear(x)) * scale}


def test_a_model_is_left_as_it_was_in_one_process():
    model = Drops()
    model.norm.eval()
    model.linear.weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with dynamo_dist.enabled():
        found = dynamo_dist.compare(model, {"x": torch.randn(4, 8), "scale": 2.0}, steps=2)
        assert dynamo_dist.is_enabled()
    assert found.ok and found.variants["ours"].launches == {}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8))
    assert model.linear.bias.grad is None and model.training and not model.norm.training
    assert str(found).count("agree") == 1 and "upstream Inductor" in str(found)
    torch.set_rng_state(random_state)


def off_by_one(gm, inputs, **kwargs):
    return lambda *args: [out + 1 for out in gm(*args)]


def test_a_wrong_backend_does_not_agree(monkeypatch):
    monkeypatch.setattr(comparison, "BACKENDS", {"upstream": "eager", "ours": off_by_one})
    found = dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)
    assert not found.ok and not found.variants["upstream"].differences
    assert found.variants["ours"].differences == {"output 0": "values differ by at most 1"}
    assert "DIFFER" in str(found) and "dynamo_dist: output 0 values differ" in str(found)


def fails(gm, inputs, **kwargs):
    raise ValueError("cannot compile this")


def test_compare_shows_upstreams_failure_and_raises_ours(monkeypatch):
    monkeypatch.setattr(comparison, "BACKENDS", {"upstream": fails, "ours": "eager"})
    with fake_group(2):
        found = dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)
    assert "cannot compile this" in found.variants["upstream"].error and found.ok
    assert "failed" in str(found)
    monkeypatch.setattr(comparison, "BACKENDS", {"upstream": "eager", "ours": fails})
    with pytest.raises(CompareError, match=r"while running ours: .*cannot compile"):
        dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)


def test_no_steps_are_refused():
    with pytest.raises(CompareError, match=r"compare\(\) got steps=0"):
        dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=0)
