"""Collectives in hooks of tensors: in the same graph, though nothing is known of a gradient's
strides there.
"""

import pytest
import torch
import torch.distributed as dist

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")


def reduced(grad):
    dist.all_reduce(grad)
    return grad


def gathered(grad):
    parts = [torch.zeros_like(grad) for _ in range(2)]
    dist.all_gather(parts, grad)
    return parts[0] + parts[1]


def scattered(grad):
    part = grad.new_zeros(grad.shape[0] // 2, grad.shape[1])
    dist.reduce_scatter_tensor(part, grad * 2)
    return torch.cat([part, part])


def exchanged(grad):
    sent = grad.clone(memory_format=torch.contiguous_format)  # as eager asks for from 2.15 on
    received = torch.zeros_like(sent)
    work = dist.all_to_all_single(received, sent, async_op=True)
    work.wait()
    return grad + 0 * received  # what a fake group exchanges is no number to compare


def sent_from_the_root(grad):
    grad = grad.clone()
    dist.broadcast(grad, 0)
    return grad


def may_write_to_its_gradient():
    """Return whether this torch traces hooks that write to what they are given; from 2.15 on it
    breaks there.
    """

    def program(x):
        y = x.sin()
        y.register_hook(lambda grad: grad.mul_(2))
        return y

    try:
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2, requires_grad=True))
    except torch._dynamo.exc.Unsupported as error:
        return "do not support input mutation" not in str(error)
    return True


HOOKS = [reduced, gathered, scattered, exchanged, sent_from_the_root]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_no_break_and_the_gradient_of_eager(hook, transposed):
    def program(x, w):
        y = x @ w
        y.register_hook(hook)
        # Of a transposed tensor the gradient comes with other strides than the tensor has.
        return (y.t() if transposed else y).sin()

    fullgraph = hook is not reduced or may_write_to_its_gradient()
    with fake_group(2):
        gradients = []
        for run in (program, torch.compile(program, backend="aot_eager", fullgraph=fullgraph)):
            x, w = torch.arange(16.0).view(4, 4).requires_grad_(), torch.eye(4, requires_grad=True)
            weight = torch.arange(1.0, 17.0).view(4, 4)
            (run(x, w) * weight).sum().backward()
            gradients.append((x.grad, w.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
