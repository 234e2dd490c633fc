"""Graphs that are left to torch, and those that may communicate."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import inductor_passes
from inductor_passes.inductor.local_graphs import is_plain
from inductor_passes.testing import fake_group

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def group():
    torch._dynamo.reset()
    with fake_group(4):
        yield
    torch._dynamo.reset()


def verdicts(fn, *inputs):
    """``is_plain`` of each graph that Dynamo makes of a call."""
    found = []

    def backend(gm, example_inputs):
        found.append(is_plain(gm, example_inputs))
        return gm.forward

    torch.compile(fn, backend=backend)(*inputs)
    return found


def attention(q):
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i - j)


def recomputed(x):
    return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def mapped(x):
    return torch.vmap(torch.dot)(x, x)


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


PLAIN = {
    "products": lambda x: torch.relu(x @ x).sum(dim=-1),
    "a module": nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout()),
    "attention of torch's": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "methods and numbers": lambda x: x.view(-1).add_(x.shape[0]).to(torch.float64).softmax(0),
    "checkpoint": recomputed,
    "cond": branch,
    "vmap": mapped,
    "autocast": under_autocast,
    "autograd function": Scaled.apply,
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_communicate_is_plain(name):
    found = verdicts(PLAIN[name], torch.randn(16, 16, requires_grad=name == "checkpoint"))
    assert found and all(found)


def test_flex_attention_is_plain():
    assert verdicts(attention, torch.randn(1, 2, 16, 16)) == [True]


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return fc.wait_tensor(fc.all_reduce(grad, "sum", "0"))


@torch.library.custom_op("test_plain::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


def sharded(x):
    return DTensor.from_local(x, init_device_mesh("cpu", (4,)), [Replicate()], run_check=False)


def test_an_operator_that_launches_is_not_plain():
    assert verdicts(lambda x: fc.all_reduce(x, "sum", "0") + 1, torch.randn(4)) == [False]


def test_a_launch_inside_an_inner_graph_is_found():
    x = torch.randn(4, requires_grad=True)
    assert verdicts(Reduced.apply, x) == [False]
    assert verdicts(functools.partial(checkpoint, Reduced.apply, use_reentrant=False), x) == [False]


def test_a_dtensor_is_not_plain():
    assert verdicts(lambda x: x * 2, sharded(torch.randn(4))) == [False]


def test_an_operator_of_others_is_not_plain():
    assert verdicts(opaque, torch.randn(4)) == [False]


def test_without_a_process_group_everything_is_plain():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(opaque._opoverload, (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule({}, graph)
    assert not is_plain(gm)
    dist.destroy_process_group()
    try:
        assert is_plain(gm)
    finally:
        torch.distributed.init_process_group(
            "fake",
            rank=0,
            world_size=4,
            store=torch.testing._internal.distributed.fake_pg.FakeStore(),
        )


def test_a_pass_that_needs_no_collective_wants_all():
    class Looks(inductor_passes.GraphPass):
        name = "looks"
        needs_collectives = False

    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert is_plain(gm)
    inductor_passes.register(Looks)
    try:
        assert not is_plain(gm)
    finally:
        inductor_passes.unregister(Looks)
