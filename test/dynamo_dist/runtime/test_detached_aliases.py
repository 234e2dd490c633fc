"""Views that a graph returns beside detached aliases of their base: they keep their gradients,
and share memory as in eager mode.
"""

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")

PROGRAMS = {
    "alias last": lambda y: (y[:4], y[4:], y.detach()),
    "alias first": lambda y: (y.detach(), y[:4], y[4:]),
    "one view": lambda y: (y[:4], y.detach()),
    "two aliases": lambda y: (y[:4], y[4:], y.detach(), y.detach()),
    "data": lambda y: (y[:4], y[4:], y.data),
    "alias of equal shape": lambda y: (y[:4], y.t(), y.view_as(y).detach()),
    "aliases of views": lambda y: (y[:4], y.t(), y.view(-1).detach(), y.t().detach()),
    "written to": lambda y: (y[:4], y[4:], y.detach().add_(1)),
    "a view of more elements": lambda y: (y.expand(2, 8, 3), y[0], y.detach()),
    "base too": lambda y: (y, y[4:], y.detach()),
}


def returned(run, x):
    """What the program returns of its argument, without values: gradients, layout, and who
    shares memory with whom.
    """
    found = run(x)
    return [
        (
            each.requires_grad,
            each.grad_fn is None,
            each.shape,
            each.stride(),
            each.storage_offset(),
            *tuple(
                each.untyped_storage()._cdata == other.untyped_storage()._cdata for other in found
            ),
        )
        for each in found
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_views_keep_their_gradients(name, without_kernels):
    def program(x):
        return PROGRAMS[name](x.sin())

    x = torch.rand(8, 3, requires_grad=True)
    run = torch.compile(program, backend="inductor", fullgraph=True)
    assert returned(run, x) == returned(program, x)
    torch.autograd.backward([each.sum() for each in run(x) if each.requires_grad])
    assert x.grad is not None


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name):
    def program(x):
        return PROGRAMS[name](x.sin())

    def gradient(run):
        x = torch.linspace(0, 1, 24).view(8, 3).requires_grad_()
        losses = [at * each.sum() for at, each in enumerate(run(x), 1) if each.requires_grad]
        return torch.autograd.grad(sum(losses), x)[0]

    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_close(gradient(run), gradient(program))
