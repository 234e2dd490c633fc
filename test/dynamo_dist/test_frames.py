"""Dynamo leaves our own functions alone where eager mode calls them below a function it gave up on."""

import pytest
import torch
from torch._dynamo import convert_frame
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def written(x):
    for _ in range(2):
        x.mul_(2).add_(x)
        torch._dynamo.graph_break()


def assigned(x):
    for _ in range(2):
        x[0] = 1
        torch._dynamo.graph_break()


def computed(x):
    for _ in range(2):
        torch.special.i0(x.cummax(0)[0]).var(0)
        torch._dynamo.graph_break()


def laid_out(x):
    for _ in range(2):
        x.redistribute(placements=[Replicate()]).chunk(2)[0].to_local()
        torch._dynamo.graph_break()


def trained(x):
    for _ in range(2):
        y = (x * 2).requires_grad_()
        (y.sort(0)[0].to_local() ** 2).sum().backward()
        torch._dynamo.graph_break()


@pytest.mark.parametrize("step", [written, assigned, computed, laid_out, trained])
def test_a_loop_with_a_break(step, monkeypatch):
    tried, stock = [], convert_frame._compile

    def compile_frame(code, *args, **kwargs):
        tried.append(code)
        return stock(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", compile_frame)

    with fake_mesh(2) as mesh:
        found, expected = (
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
            for _ in range(2)
        )
        torch.compile(step, backend="aot_eager")(found)
        step(expected)
    assert tried
    assert [
        code
        for code in tried
        if "/dynamo_dist/" in code.co_filename and "/test/" not in code.co_filename
    ] == []
    torch.testing.assert_close(found.to_local(), expected.to_local())
