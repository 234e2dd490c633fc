"""What a training forward reads of an input before it writes to it is what its backward has."""

import copy

import pytest
import torch
from torch import nn

import inductor_passes
from inductor_passes.inductor.session import graph_passes_only


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        out = y - self.centre
        self.centre.copy_(y.detach().mean(0))
        return out


LOSSES = {
    "absolute": lambda out: out.abs().mean(),
    "squared": lambda out: out.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_use_what_was_read(name):
    eager = Centred()
    model = copy.deepcopy(eager)

    def step(module, x, y):
        return LOSSES[name](module(x)) + LOSSES[name](module(y))

    x, y = torch.randn(3, 8), torch.randn(3, 8)
    with graph_passes_only():
        torch._dynamo.reset()
        compiled = torch.compile(step, options=inductor_passes.options(), fullgraph=True)
        compiled(model, x, y).backward()
    step(eager, x, y).backward()
    torch.testing.assert_close(model.centre, eager.centre)
    for ours, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad)
