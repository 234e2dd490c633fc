"""What DDP and FSDP2 modules ask for and a graph cannot hold breaks with a fix, and the fixes
work.
"""

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
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


def test_ddp_with_a_communication_hook(mesh):
    model = DistributedDataParallel(Block())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    text = refused(lambda x: model(x) * 2, torch.ones(2, 8))
    assert "DistributedDataParallel module called in a compiled function" in text
    assert "no counterpart of its communication hook" in text
    assert "DistributedDataParallel(torch.compile(module))" in text


def test_what_ddp_wraps_compiles(mesh, compiled):
    block = Block()
    function, graphs = compiled(block)
    model = DistributedDataParallel(function)  # its reducer refuses fake groups in backward
    torch.testing.assert_close(model(torch.ones(2, 8)), block(torch.ones(2, 8)))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (lambda model: model.set_all_reduce_hook(lambda grad: None), "set_all_reduce_hook"),
        (lambda model: model.set_custom_all_gather(object()), "custom communication (object)"),
    ],
)
def test_fsdp2_with_communication_of_its_own(mesh, patch, why):
    model = fully_shard(Block(), mesh=mesh["tp"])
    patch(model)
    text = refused(lambda x: model(x) * 2, torch.ones(2, 8))
    assert "FSDP2 module called in a compiled function" in text
    assert f"no counterpart of its {why}" in text
    assert "block.compile()" in text


def test_fsdp2_offloaded_to_the_cpu(mesh):
    policy = CPUOffloadPolicy(pin_memory=False)
    model = fully_shard(Block(), mesh=mesh["tp"], offload_policy=policy)
    assert "no counterpart of its CPUOffloadPolicy" in refused(
        lambda x: model(x) * 2, torch.ones(2, 8)
    )


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


def test_nothing_of_ours_is_a_frame_beside_ddps(mesh, monkeypatch):
    """What runs between graphs is Python that Dynamo would trace."""
    traced = []
    trace_frame = convert_frame.trace_frame

    def noted(code, *args, **kwargs):
        traced.append(code.co_qualname)
        return trace_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "trace_frame", noted)
    model = DistributedDataParallel(Block())
    compiled = torch.compile(model, backend="aot_eager")
    with model.no_sync():
        model(torch.ones(2, 8))  # in eager mode, and not averaged
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    with model.no_sync():
        compiled(torch.ones(2, 8))
    assert traced and all(each.endswith((".call", ".forward")) for each in traced)
