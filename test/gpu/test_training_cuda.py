"""Training steps on one GPU, through Inductor and Triton: eager's losses and parameters, with CUDA
graphs and without, on one NCCL rank and on two gloo ranks that share the device.
"""

import logging
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import dynamo_dist
from dynamo_dist.settings import OLDEST

TORCH = tuple(int(each) for each in torch.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(TORCH < OLDEST, reason=f"dynamo_dist needs torch {OLDEST}"),
]
DEVICE = "cuda"
WIDTH = 64
PARALLEL = ("fsdp2", "ddp", "tensor")
STEPS = 5  # CUDA graphs warm up, record and replay


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def sharded(parallel):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    if parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model:
        if parallel == "tensor":
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    return model if parallel == "tensor" else fully_shard(model, mesh=mesh)


def training(parallel, form, options):
    """Losses of some steps, and the parameters and states after them."""
    model = sharded(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = {"backend": "dynamo_dist", "fullgraph": True, "options": options}
    forward = torch.compile(model, **compiled) if form == "separate" else model

    def step(x):
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if form == "whole":
        step = torch.compile(step, **compiled)
    generator = torch.Generator().manual_seed(dist.get_rank() if parallel != "tensor" else 0)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator).to(DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        losses.append(step(x).item())
    moments = [optimizer.state[each]["exp_avg_sq"] for each in model.parameters()]
    local = [getattr(each, "_local_tensor", each) for each in (*model.parameters(), *moments)]
    return losses, [each.detach().clone() for each in local]


def compare(parallel, form, options):
    want = training(parallel, "eager", {})
    torch.compiler.reset()
    counters.clear()
    with dynamo_dist.enabled():
        found = training(parallel, form, options)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def emit(self, record):
        self.found[record.getMessage()] += 1


@pytest.fixture
def one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("form", ["separate", "whole"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_training_step_equals_eager(one_rank, parallel, form, cuda_graphs):
    messages = Messages()
    log = logging.getLogger("torch.__perf_hints")
    torch._logging.set_logs(perf_hints=True)
    log.addHandler(messages)
    try:
        compare(parallel, form, {"triton.cudagraphs": cuda_graphs})
    finally:
        log.removeHandler(messages)
        torch._logging.set_logs()
    skipped = [each for each in messages.found if "skipping cudagraphs" in each]
    if form == "whole":
        assert skipped == []


def rank_of_two(rank, folder, parallel):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    compare(parallel, "whole", {})
    compare(parallel, "separate", {})
    dist.destroy_process_group()


@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_that_share_a_device_equal_eager(tmp_path, parallel):
    mp.spawn(rank_of_two, (str(tmp_path), parallel), nprocs=2)
