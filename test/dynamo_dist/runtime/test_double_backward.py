"""Gradients of gradients that are asked for outside: refused through compiled graphs on
DTensors, and nowhere else.
"""

import pytest
import torch
from torch.autograd import grad
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing import assert_close

from dynamo_dist.errors import DTensorError

pytestmark = pytest.mark.usefixtures("enabled")


def leaf(mesh):
    whole = torch.arange(8.0).view(2, 4) / 7
    return distribute_tensor(whole, mesh["tp"], [Replicate()], src_data_rank=None).requires_grad_()


def cubed(x):
    return (x**3).sum().to_local()


@pytest.fixture
def run():
    return torch.compile(cubed, backend="aot_eager", fullgraph=True)


def test_it_says_what_to_do(mesh, run):
    x = leaf(mesh)
    with pytest.raises(DTensorError, match="inside the compiled function"):
        grad(run(x), x, create_graph=True)
    with pytest.raises(DTensorError, match="inside the compiled function"):
        (run(x) + cubed(x)).backward(create_graph=True)


def test_one_gradient_is_eagers(mesh, run):
    x = leaf(mesh)
    assert_close(grad(run(x), x, retain_graph=True)[0].to_local(), grad(cubed(x), x)[0].to_local())


def test_a_compiled_graph_that_is_not_on_the_way_is_none(mesh, run):
    x, w = leaf(mesh), leaf(mesh)
    loss = cubed(w * x.detach()) + run(x)
    (g,) = grad(loss, w, create_graph=True)
    assert g.requires_grad
    (g,) = grad(run(w * 2).detach() * cubed(w), w, create_graph=True)
    assert grad(g.sum().to_local(), w)[0] is not None


def test_what_stands_before_a_gradient_is_not_on_the_way(mesh, run):
    x = leaf(mesh)
    y = run(x)
    (g,) = grad(y.square(), y, create_graph=True)
    assert_close(g, 2 * y)


def test_plain_tensors_are_torchs(mesh):
    x = torch.ones(3, requires_grad=True)
    run = torch.compile(lambda x: (x**3).sum(), backend="aot_eager")
    (g,) = grad(run(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad(g.sum(), x)


def test_a_graph_from_the_cache_refuses_too(mesh, without_kernels):
    for _ in range(2):
        torch._dynamo.reset()
        x = leaf(mesh)
        run = torch.compile(cubed, backend="inductor", fullgraph=True)
        with pytest.raises(DTensorError, match="inside the compiled function"):
            grad(run(x), x, create_graph=True)


def cubes(x):
    return (x**3).sum()


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize(
    "transform", ["vjp", "jacrev", "jacfwd of jacrev", "hessian", "vmap of grad"]
)
def test_function_transforms_are_torchs(backend, transform):
    x = torch.arange(3.0)
    run = {
        "vjp": lambda x: torch.func.vjp(cubes, x)[1](torch.tensor(1.0))[0],
        "jacrev": torch.func.jacrev(cubes),
        "jacfwd of jacrev": torch.func.jacfwd(torch.func.jacrev(cubes)),
        "hessian": torch.func.hessian(cubes),
        "vmap of grad": torch.func.vmap(torch.func.grad(cubes)),
    }[transform]
    if transform == "vmap of grad":
        x = x.view(3, 1)
    expected = 6 * torch.diag(x) if transform in ("hessian", "jacfwd of jacrev") else 3 * x**2
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(run, backend=backend)
    assert_close(run(x), expected)
