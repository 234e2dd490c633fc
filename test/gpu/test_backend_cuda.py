"""On one GPU with a real NCCL group of one rank: numbers, order in Triton code, CUDA graphs."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import inductor_passes as ip
from inductor_passes.report import recorder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
D = 256


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    ip.uninstall()
    torch._dynamo.reset()
    dist.destroy_process_group()


def layers(x, *weights):
    for w in weights:
        x = torch.relu(x @ fc.all_gather_tensor(w, 0, dist.group.WORLD)) * 0.05
    return x


def tensors(grad):
    torch.manual_seed(0)
    shapes = [(64, D)] + [(D, D)] * 4
    return [torch.randn(*s, device="cuda", requires_grad=grad) for s in shapes]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_training_equals_eager_and_keeps_its_order(mode):
    def step(fn):
        inputs = tensors(grad=True)
        for _ in range(3):  # CUDA graphs warm up, record and replay
            out = fn(*inputs)
            grads = torch.autograd.grad(out.sum(), inputs)
        return [out.detach().clone(), *(g.clone() for g in grads)]

    ip.install()
    with recorder.records_of_block() as records:
        got = step(torch.compile(layers, fullgraph=True, mode=mode))
    torch.testing.assert_close(got, step(layers))
    assert [r.phase for r in records] == ["forward", "backward"]
    assert all(r.order_kept for r in records)
    assert {r.topology for r in records} <= {"h100x8", "h200x8"}


def test_a_cpu_tensor_on_an_nccl_group_is_said_while_compiling():
    def reduced(x):
        return fc.all_reduce(x, "sum", dist.group.WORLD) + 1

    with pytest.raises(Exception, match=r"cpu tensor.*serve cuda.*init_device_mesh"):
        torch.compile(reduced, options=ip.options())(torch.ones(4))
