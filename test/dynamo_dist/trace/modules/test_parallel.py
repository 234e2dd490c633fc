"""DDP and FSDP2 modules inside a compiled function break with a fix, and the fixes work."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("enabled")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)


def refused(function, *args):
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    return str(caught.value)


def test_ddp(mesh):
    model = DistributedDataParallel(Block())
    text = refused(lambda x: model(x) * 2, torch.ones(2, 8))
    assert "DistributedDataParallel module called in a compiled function" in text
    assert "DistributedDataParallel(torch.compile(module, fullgraph=True))" in text


def test_what_ddp_wraps_compiles(mesh, compiled):
    block = Block()
    function, graphs = compiled(block)
    model = DistributedDataParallel(function)  # its reducer refuses fake groups in backward
    torch.testing.assert_close(model(torch.ones(2, 8)), block(torch.ones(2, 8)))
    assert len(graphs) == 1


def test_fsdp2_module(mesh):
    model = fully_shard(Block(), mesh=mesh["tp"])
    text = refused(lambda x: model(x) * 2, torch.ones(2, 8))
    assert "FSDP2 module called in a compiled function" in text
    assert "block.compile()" in text


def test_sharded_blocks_compile(mesh):
    blocks = nn.Sequential(Block(), Block())
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh["tp"])
    fully_shard(blocks, mesh=mesh["tp"])
    blocks(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())


@pytest.mark.parametrize("name", ["unshard", "reshard"])
def test_fsdp2_method(mesh, name):
    model = fully_shard(Block(), mesh=mesh["tp"])

    def program(x):
        getattr(model, name)()
        return x + 1

    text = refused(program, torch.ones(2))
    assert "gathered or freed in a compiled function" in text
    assert f"model.{name}(); y = compiled(x)" in text


def test_backward_inside(mesh):
    def program(x):
        loss = (x * 2).sum()
        loss.backward()
        return x.grad

    text = refused(program, torch.ones(2, requires_grad=True))
    assert "backward() inside a compiled function" in text
    assert "loss = compiled(x)" in text


def test_backward_inside_is_traced_where_the_user_told_torch_to(mesh):
    def program(x):
        (x * 2).sum().backward()
        return x.grad * 1

    x = torch.ones(2, requires_grad=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    assert found.tolist() == [2, 2]
