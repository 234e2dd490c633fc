"""``torch.autograd.grad`` inside a compiled function: in its graph, or after a break that says
why.
"""

import pytest
import torch
from torch.autograd import grad
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")


def leaf(mesh, seed=0, placement=None):
    torch.manual_seed(seed)
    whole = distribute_tensor(torch.randn(8, 8), mesh["tp"], [placement or Replicate()])
    return whole.detach().requires_grad_()


def gradients_of(function, args):
    for arg in args:
        arg.grad = None
    found = function(*args)
    found = found if isinstance(found, tuple) else (found,)
    if losses := [each.sum() for each in found if each.requires_grad]:
        torch.stack([each.full_tensor() for each in losses]).sum().backward()
    found = [*found, *(arg.grad for arg in args if arg.is_leaf and arg.grad is not None)]
    return [each.detach().full_tensor() for each in found]


def same(function, args, run):
    expected = gradients_of(function, args)
    for _ in range(2):
        assert_close(gradients_of(run, args), expected)


def penalty(x, w):
    y = (x @ w).sin()
    (g,) = grad(y.sum(), x, create_graph=True)
    return y.square().mean() + g.square().mean()


def with_hook_inside(x, w):
    y = x @ w
    y.register_hook(lambda g: g * 3)
    return grad(y.sin().sum(), [x, w])


def third(x, w):
    (g,) = grad((x**4).sum(), x, create_graph=True)
    (h,) = grad((g * w).sum(), x, create_graph=True)
    return h.square().sum()


def unused(x, w):
    return grad(x.sin().sum(), (x, w), allow_unused=True, materialize_grads=True)


def kept(x, w):
    y = (x @ w).sin()
    return y, grad(y.sum(), x, retain_graph=True)[0], grad(y.sum(), w, retain_graph=True)[0]


def without_gradients(x, w):
    with torch.no_grad():
        scale = w.abs().sum()
    return grad((x * scale).sin().sum(), x)[0]


def from_outputs(x, w):
    return grad(x.sin(), x, grad_outputs=w.detach())[0]


IN_GRAPH = [penalty, with_hook_inside, third, unused, kept, without_gradients, from_outputs]


@pytest.mark.parametrize("function", IN_GRAPH, ids=lambda each: each.__name__)
def test_in_one_graph_with_eagers_numbers(mesh, function):
    args = leaf(mesh), leaf(mesh, 1)
    same(function, args, torch.compile(function, backend="aot_eager", fullgraph=True))


def test_dynamic_sizes(mesh):
    run = torch.compile(penalty, backend="aot_eager", fullgraph=True, dynamic=True)
    same(penalty, (leaf(mesh), leaf(mesh, 1)), run)


def test_the_gradient_of_a_weight_stays_pending(mesh, compiled):
    run, graphs = compiled(lambda x, w: grad((x @ w).sin().sum(), w)[0])
    assert run(leaf(mesh, placement=Shard(0)), leaf(mesh, 1)).placements[0].is_partial()
    assert len(graphs) == 1


def broken(function, args, said):
    """Both ways: an error under ``fullgraph`` that says why, and eager's numbers without."""
    with pytest.raises(Exception, match=said):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    torch.compiler.reset()
    same(function, args, torch.compile(function, backend="aot_eager"))


def gradient(x):
    return grad((x**3).sum(), x)[0]


def test_a_hook_on_what_the_gradient_is_of_breaks(mesh):
    x = leaf(mesh)
    x.register_hook(lambda g: g * 3)
    broken(gradient, (x,), "A hook stands on a tensor whose gradient is asked for")


def test_a_hook_that_comes_later_is_seen(mesh):
    x, run = leaf(mesh), torch.compile(gradient, backend="aot_eager")
    same(gradient, (x,), run)
    x.register_hook(lambda g: g * 3)
    same(gradient, (x,), run)


def weighted(w, x):
    return grad((w * x).sin().sum(), x, allow_unused=True)[0]


def test_a_history_outside_the_graph_breaks(mesh):
    x = leaf(mesh)
    with pytest.raises(Exception, match=r"external grad_fn|autograd graph"):
        torch.compile(weighted, backend="aot_eager", fullgraph=True)(x * 2, x)
    torch.compiler.reset()
    run = torch.compile(weighted, backend="aot_eager")
    for w in (leaf(mesh, 1), x * 2, leaf(mesh, 1)):
        again = w if w.is_leaf else x * 2
        assert_close(run(w, x).full_tensor(), weighted(again, x).full_tensor())


def test_a_result_whose_history_is_used_up_is_detached(mesh):
    def loss_and_gradient(x):
        loss = x.sin().sum()
        return loss, grad(loss, x)[0]

    x = leaf(mesh)
    found = torch.compile(loss_and_gradient, backend="aot_eager", fullgraph=True)(x)
    assert not any(each.requires_grad for each in found)
    for one, other in zip(found, loss_and_gradient(x), strict=True):
        assert_close(one.full_tensor(), other.detach().full_tensor())


def test_a_result_whose_history_can_be_used_again_breaks(mesh):
    def sum_and_gradient(x):
        result = x + 1
        return result, grad(result.sum(), x)[0]

    x = leaf(mesh)
    with pytest.raises(Exception, match="consumed"):
        torch.compile(sum_and_gradient, backend="aot_eager", fullgraph=True)(x)
    torch.compiler.reset()
    found = torch.compile(sum_and_gradient, backend="aot_eager")(x)
    for one, other in zip(found, sum_and_gradient(x), strict=True):
        assert_close(one.detach().full_tensor(), other.detach().full_tensor())


def test_what_eager_refuses_is_eagers_error(mesh):
    def of_another(x, w):
        return grad(x.sin().sum(), w)

    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.compile(of_another, backend="aot_eager")(leaf(mesh), leaf(mesh, 1))


def test_plain_programs_of_other_backends_are_as_in_upstream():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(Exception, match="trace_autograd_ops"):
        torch.compile(gradient, backend="aot_eager", fullgraph=True)(x)
