"""Operators that take functions train as without the plugin, whatever the sizes are."""

import pytest
import torch
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import flex_attention as flex

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def branch(x):
    return torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (x,))


def scanned(x):
    return scan(lambda carry, row: (carry + row.sin(), carry * row), torch.zeros_like(x[0]), x)[1]


def mapped(x):
    return map_rows(lambda row, y: row.sin() * y.sum(), x, x * 2)


@torch.compiler.nested_compile_region
def region(x):
    return x.sin() * x


def regions(x):
    return region(region(x))


def attention(x):
    heads = x.reshape(1, 2, x.shape[0], 8)
    return flex.flex_attention(heads, heads, heads, lambda score, b, h, q, k: score + q - k)


PROGRAMS = [branch, scanned, mapped, regions, attention]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_training(program, dynamic, monkeypatch):
    # Backward on the CPU is refused for want of a kernel there; what traces it is the same.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (6, 8):
        x = torch.randn(rows, 16, requires_grad=True)
        compiled(x).sum().backward()
        (expected,) = torch.autograd.grad(program(x).sum(), x)
        torch.testing.assert_close(x.grad, expected)


def test_training_beside_dtensors_of_any_size():
    """Where plain tensors do become replicas: zeros for the part of a split that nobody used."""

    def program(x, y):
        return x.chunk(2, 1)[1].to_local().sum() + branch(y).sum()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    with fake_mesh(2) as mesh:
        for rows in (4, 6):
            x = distribute_tensor(torch.randn(rows, 8), mesh, [Shard(0)], src_data_rank=None)
            y = torch.randn(rows, 3)
            found, expected = (
                torch.autograd.grad(each(*given), given)
                for each in (compiled, program)
                for given in [(x.detach().requires_grad_(), y.detach().requires_grad_())]
            )
            assert torch.equal(found[0].full_tensor(), expected[0].full_tensor())
            torch.testing.assert_close(found[1], expected[1])
