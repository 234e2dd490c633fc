"""Module backward hooks are part of the graph, with eager's gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.usefixtures("enabled", "mesh")


class Pair(nn.Module):
    """Two tensors and a flag in, two tensors out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y, flag):
        return self.linear(x).sin(), y + 1


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x, y):
        a, b = self.pair(x * 2, y, "flag")
        return (a + b).sum()


def in_eager_and_compiled(model, requires_grad=(True, True)):
    """The gradients of parameters and inputs, from eager and from two compiled calls."""

    def run(function):
        inputs = [
            torch.arange(12.0).view(3, 4).div(7).requires_grad_(first) for first in requires_grad
        ]
        model.zero_grad()
        function(*inputs).backward()
        return [leaf.grad for leaf in (*model.parameters(), *inputs) if leaf.grad is not None]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    return run(model), run(compiled), run(compiled)


HOOKS = {
    "scales": lambda module, given, of: (given[0] * 2, given[1] * 3, None),
    "reads the output's": lambda module, given, of: (
        given[0] + of[0].sum(),
        given[1] * of[1].mean(),
        None,
    ),
    "reads a parameter": lambda module, given, of: (
        given[0] * module.linear.weight.detach().sum(),
        given[1],
        None,
    ),
    "reduces": lambda module, given, of: (
        funcol.all_reduce(given[0], "avg", dist.group.WORLD) * 2,
        given[1],
        None,
    ),
    "looks on": lambda module, given, of: None,
}


@pytest.mark.parametrize("name", HOOKS)
def test_full_hooks(name):
    model = Outer()
    model.pair.register_full_backward_hook(HOOKS[name])
    eager, *compiled = in_eager_and_compiled(model)
    for found in compiled:
        torch.testing.assert_close(found, eager)


@pytest.mark.parametrize("requires_grad", [(True, True), (False, True), (False, False)])
def test_pre_hooks_then_full_hooks(requires_grad):
    model = Outer()
    model.pair.register_full_backward_pre_hook(lambda module, of: (of[0] * 3, of[1]))
    model.pair.register_full_backward_hook(
        lambda module, given, of: (
            tuple(None if grad is None else grad + of[0].sum() for grad in given)
            if any(grad is not None for grad in given)
            else None
        )
    )
    eager, *compiled = in_eager_and_compiled(model, requires_grad)
    for found in compiled:
        torch.testing.assert_close(found, eager)


def test_hooks_of_the_compiled_module_itself():
    model = Outer()
    model.register_full_backward_hook(lambda module, given, of: (given[0] * 2, given[1]))
    eager, compiled, _ = in_eager_and_compiled(model)
    torch.testing.assert_close(compiled, eager)


def test_gradients_that_are_dtensors(mesh):
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(
        distribute_tensor(model.weight, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    )
    model.register_full_backward_hook(lambda module, given, of: (given[0] * 2,))
    outer = nn.Sequential(model)

    def gradient(function):
        x = distribute_tensor(torch.ones(4, 8), mesh, [Replicate()] * 2, src_data_rank=None)
        x = x.detach().requires_grad_()
        function(x).sum().full_tensor().backward()
        return x.grad.full_tensor()

    compiled = torch.compile(outer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(compiled), gradient(outer))


def test_a_hook_with_another_effect_breaks_with_a_fix():
    seen = []
    model = Outer()
    model.pair.register_full_backward_hook(lambda module, given, of: seen.append(of[0]))
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        in_eager_and_compiled(model)
    assert "Module backward hook that is no plain computation" in str(caught.value)
    assert "y.register_hook(hook)" in str(caught.value)


def test_the_layout_of_a_gradient_is_not_known_in_a_hook(mesh):
    def hook(module, given, of):
        return (given[0] * 2 if given[0].placements[0].is_replicate() else given[0],)

    inner = nn.Identity()
    inner.register_full_backward_hook(hook)
    model = nn.Sequential(inner)
    x = distribute_tensor(torch.ones(4, 8), mesh, [Replicate()] * 2, src_data_rank=None)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Layout of a gradient"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x.detach().requires_grad_())
