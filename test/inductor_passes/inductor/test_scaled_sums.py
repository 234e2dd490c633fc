"""A sum with a matrix product keeps its ``alpha`` through Inductor's fusions."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_passes
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.torch_compat.inductor import write_alpha_as_product

SUMS = {
    "added in place": lambda p, a, b: p.add_(a @ b, alpha=-0.1),
    "added": lambda p, a, b: torch.add(p, a @ b, alpha=3),
    "product first": lambda p, a, b: torch.add(a @ b, p, alpha=-0.5),
    "subtracted": lambda p, a, b: torch.sub(p, a @ b, alpha=0.1),
    "two products": lambda p, a, b: torch.add(a @ b, b @ a, alpha=2.5),
    "batched": lambda p, a, b: torch.add(p[None], a[None] @ b[None], alpha=2.5),
    "with a bias": lambda p, a, b: torch.add(p, torch.addmm(b, a, b), alpha=2.5),
}


@pytest.mark.parametrize("name", SUMS)
def test_alpha_is_kept_beside_matrix_products(name):
    torch._dynamo.reset()
    given = [torch.randn(8, 8, dtype=torch.float64) for _ in range(3)]
    want = SUMS[name](*(each.clone() for each in given))
    with graph_passes_only():
        compiled = torch.compile(SUMS[name], options=inductor_passes.options(), fullgraph=True)
        torch.testing.assert_close(compiled(*given), want)


def traced(function):
    return make_fx(function, tracing_mode="fake")(*(torch.randn(4, 4) for _ in range(3))).graph


def targets(graph: fx.Graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_alpha_becomes_a_product_once():
    graph = traced(lambda p, a, b: torch.add(p, a @ b, alpha=2))
    assert write_alpha_as_product(graph) == 1
    assert targets(graph) == ["aten.mm.default", "aten.mul.Tensor", "aten.add.Tensor"]
    graph.lint()
    assert write_alpha_as_product(graph) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda p, a, b: torch.add(p, a @ b),
        lambda p, a, b: torch.add(p, a * b, alpha=2),
        lambda p, a, b: torch.add(a @ b, 2.0, alpha=3),
    ],
)
def test_sums_that_patterns_take_rightly_stay(function):
    graph = traced(function)
    before = str(graph)
    assert write_alpha_as_product(graph) == 0
    assert str(graph) == before
