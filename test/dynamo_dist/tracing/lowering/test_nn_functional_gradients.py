"""Gradients of ``torch.distributed.nn.functional``, and of autograd functions that apply others."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnf

from dynamo_dist.testing import fake_mesh


def whole(x, ranks):
    return [torch.empty_like(x) for _ in range(ranks)]


PROGRAMS = {
    "all_gather": lambda x, group: torch.cat(dnf.all_gather(x * 1, group=group)),
    "all_to_all": lambda x, group: torch.cat(
        dnf.all_to_all(whole(x, group.size()), [x * n for n in range(group.size())], group=group)
    ),
    "all_to_all_single": lambda x, group: dnf.all_to_all_single(
        torch.empty_like(x), x.sin(), group=group
    ),
    "all_reduce": lambda x, group: dnf.all_reduce(x.sin(), group=group),
    "broadcast": lambda x, group: dnf.broadcast(x.sin(), 0, group=group),
    "reduce": lambda x, group: dnf.reduce(x.sin(), 0, group=group),
    "gather": lambda x, group: torch.cat(dnf.gather(x.sin(), 0, group=group)),
    "scatter": lambda x, group: dnf.scatter([x * n for n in range(group.size())], 0, group=group),
    "reduce_scatter": lambda x, group: dnf.reduce_scatter(
        torch.empty_like(x), [x * n for n in range(group.size())], group=group
    ),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_there_is_a_gradient(enabled, program, ranks):
    """For each number of ranks: upstream counts arguments, of which these have as many as there
    are ranks.
    """
    results = []
    with fake_mesh(ranks) as mesh:
        for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
            x = torch.linspace(0, 1, ranks * 3).reshape(ranks, 3).requires_grad_()
            result = wrap(lambda x, m: PROGRAMS[program](x, m.get_group(0)))(x, mesh)
            result.sum().backward()
            results.append((result.detach(), x.grad))
    for eager, compiled in zip(*results, strict=True):
        assert eager.shape == compiled.shape  # numbers: ``gloo_programs``


class Total(torch.autograd.Function):
    """Any number of tensors, summed over the ranks; in the other style the context comes
    afterwards.
    """

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        total = torch.stack(tensors).sum(0)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return None, *[gradient] * 2


class LateTotal(Total):
    @staticmethod
    def forward(group, *tensors):
        return torch.stack(tensors).sum(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("function", [Total, LateTotal])
@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_function_without_gradients_gets_its_context_only(enabled, mesh, function, tensors):
    group = mesh.get_group("tp")
    x = torch.ones(3)
    step = torch.compile(
        lambda x: function.apply(group, *[x] * tensors), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(step(x), x * tensors)
