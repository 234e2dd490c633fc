"""What AOTAutograd makes of equal launches where ranks settle what they launch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from inductor_passes.graph.collectives import launches, waits_of
from inductor_passes.inductor.graph_module import capturing
from inductor_passes.rewrite.share_collectives import equal_launches_stay
from inductor_passes.testing import fake_group


def summed(x):
    return fc.all_reduce(x, "sum", dist.group.WORLD)


class Twice(torch.autograd.Function):
    """What is launched for a result is launched again for its gradient."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ fc.all_gather_tensor(w, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad @ fc.all_gather_tensor(w, 0, dist.group.WORLD).t(), None


def in_forward(x, w):
    return x * summed(w.mean(0)) + (x * 2) @ w.t() * summed(w.mean(0)).mean()


def in_both(x, w):
    return Twice.apply(x, w)


def in_backward(x, w):
    one, other = x * 1.0, x * 2.0
    for each in (one, other):
        each.register_hook(lambda grad: grad + summed(grad))
    return one + other


class Returned(torch.autograd.Function):
    """A gradient that is what the result was made of: it needs memory of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * summed(w)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, summed(ctx.saved_tensors[0])


@pytest.mark.parametrize(
    ("function", "stays", "phases"),
    [
        (in_forward, True, {"forward": 2, "backward": 0}),
        (in_forward, False, {"forward": 1, "backward": 0}),
        (in_backward, True, {"forward": 0, "backward": 2}),
        (in_backward, False, {"forward": 0, "backward": 1}),
        (in_both, True, {"forward": 1, "backward": 0}),
        (Returned.apply, True, {"forward": 2, "backward": 0}),
    ],
)
def test_equal_launches_are_shared_by_agreement_alone(function, stays, phases):
    torch._dynamo.reset()
    with fake_group(2), capturing() as (backend, found):
        x = torch.randn(4, 4, requires_grad=True)
        w = torch.randn(
            2 if function is in_both else 4, 4, requires_grad=function == Returned.apply
        )
        with equal_launches_stay() if stays else contextlib.nullcontext():
            torch.compile(function, backend=backend)(x, w).sum().backward()
    assert {each.phase: len(launches(each.graph)) for each in found} == phases
    waits = [len(waits_of(launch)) for each in found for launch in launches(each.graph)]
    assert not stays or set(waits) == {1}
