"""Whole steps of parallel modules on two or four gloo ranks, beside eager: losses, parameters,
launches.
"""

import contextlib
import sys
from collections import Counter

import torch
import torch.distributed as dist
import whole_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from inductor_passes.graph.collectives import input_tensors, kind, launches

WIDTH, BLOCKS, STEPS = 8, 2, 4
MICRO_BATCHES = 2
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def meshes(name):
    """The mesh of a wrapper, and this rank's place among those that have batches of their own."""
    if name == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        return mesh, dist.get_rank()
    if name == "fsdp2 x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return mesh, mesh["dp"].get_local_rank()
    # Tensor parallel ranks compute from the same batch.
    return init_device_mesh("cpu", (2,)), 0 if name == "tp" else dist.get_rank()


def sharded_by_tensor(model, mesh):
    plan = {f"{i}.up": ColwiseParallel() for i in range(BLOCKS)}
    plan |= {f"{i}.down": RowwiseParallel() for i in range(BLOCKS)}
    return parallelize_module(model, mesh, plan)


def fully_sharded(model, mesh):
    for block in model[:BLOCKS]:
        fully_shard(block, mesh=mesh)
    # The last layer is the root's own: it stays gathered between forward and backward.
    return fully_shard(model, mesh=mesh)


def sharded_twice(model, mesh):
    return fully_sharded(sharded_by_tensor(model, mesh["tp"]), mesh["dp"])


def averaged(model, mesh):
    return DistributedDataParallel(model)


WRAPPERS = {
    "tp": sharded_by_tensor,
    "fsdp2": fully_sharded,
    "ddp": averaged,
    "hsdp": fully_sharded,
    "fsdp2 x tp": sharded_twice,
}


def plain(model, optimizer):
    return whole_step.plain_step(model, optimizer)


def clipped(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm.full_tensor() if isinstance(norm, DTensor) else norm

    return step


def accumulated(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        losses = []
        for micro in x.chunk(MICRO_BATCHES):
            loss = model(micro).square().mean() / MICRO_BATCHES
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def synchronizing(model, is_on):
    """As a program says whether the backward of a micro-batch reduces."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if is_on else model.no_sync()
    model.set_requires_gradient_sync(is_on)
    return contextlib.nullcontext()


def accumulated_locally(model, optimizer):
    """Only the last micro-batch reduces, what all have accumulated."""

    def step(x):
        losses = []
        for i, micro in enumerate(x.chunk(MICRO_BATCHES)):
            with synchronizing(model, i == MICRO_BATCHES - 1):
                loss = model(micro).square().mean() / MICRO_BATCHES
                loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def accumulated_before(model, optimizer):
    """The step reduces what a backward outside of it has left."""
    last = plain(model, optimizer)

    @torch.compiler.disable
    def first(x):
        with synchronizing(model, False):
            model(x).square().mean().backward()
        synchronizing(model, True)

    def step(x):
        first(x)
        torch._dynamo.graph_break()
        return last(x)

    return step


def never_synchronized(model, optimizer):
    def step(x):
        with synchronizing(model, False):
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        return loss

    return step


def one_of_three_reduces(model, optimizer):
    """A call for each micro-batch: what the first two leave is reduced by the third."""
    turn = [0]

    def step(x):
        is_last = turn[0] == 2
        turn[0] = 0 if is_last else turn[0] + 1
        with synchronizing(model, is_last):
            loss = model(x).square().mean()
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def updated_in_backward(model, optimizer):
    """Each parameter has an optimizer of its own, which steps when its gradient is there."""
    optimizers = {each: torch.optim.SGD([each], lr=0.05) for each in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


def broken_before_backward(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        torch._dynamo.graph_break()
        loss.backward()
        optimizer.step()
        return loss

    return step


def broken_behind_backward(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch._dynamo.graph_break()
        optimizer.step()
        return loss

    return step


BROKEN = (broken_before_backward, broken_behind_backward, accumulated_before, never_synchronized)
SEVERAL = (*BROKEN, one_of_three_reduces)  # more than one graph


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build(wrap, mesh, make, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, WIDTH)).double()
    count = sum(parameter.numel() for parameter in model.parameters())
    model = wrap(model, mesh)
    step = make(model, OPTIMIZERS[optimizer](model.parameters()))
    return count, [local(each.detach()) for each in model.parameters()], step


def counted(graph, sent):
    """Add up what the launches of a graph send, before passes change them."""
    for launch in launches(graph):
        sent[kind(launch)] += sum(tensor.numel() for tensor in input_tensors(launch))


def check(name, make, optimizer, uneven):
    mesh, rank = meshes(name)
    rows = 4 + 2 * rank if uneven else 4
    inputs = []
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(10 * i + rank)
        inputs.append(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64))
    sent = Counter()
    count, shards, _ = build(WRAPPERS[name], mesh, make, optimizer)
    whole_step.compare(
        lambda: build(WRAPPERS[name], mesh, make, optimizer)[1:],
        inputs,
        tolerance=1e-10,
        graphs=None if make in SEVERAL else 1,
        fullgraph=make not in SEVERAL,
        options={"post_grad_custom_pre_pass": lambda graph: counted(graph, sent)},
    )
    print(name, make.__name__, optimizer, "ok", flush=True)
    if make in SEVERAL:
        return
    gathers = MICRO_BATCHES if make in (accumulated, accumulated_locally) else 1
    times = MICRO_BATCHES if make is accumulated else 1
    if name == "ddp":
        assert sent == {"all_reduce": times * count}, sent
    if name in ("fsdp2", "hsdp", "fsdp2 x tp"):
        held = sum(shard.numel() for shard in shards)
        # Eager gathers all of the blocks again for backward; the graph keeps what it may.
        assert sent["reduce_scatter"] == times * 2 * held, (sent, held)
        assert sent["all_gather"] <= gathers * 2 * held, (sent, held)
    if name in ("fsdp2", "hsdp"):
        # The norm of each gradient, as in eager; and what copies average.
        norms = len(shards) if make is clipped else 0
        copied = times * held if name == "hsdp" else 0
        assert sent["all_reduce"] == norms + copied, sent


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wrapper, *parts = sys.argv[1:]
    if parts == ["in turns"]:
        check(wrapper, one_of_three_reduces, "adamw", True)
    elif parts == ["broken"]:
        for make in BROKEN:
            if wrapper != "tp" or make not in (accumulated_before, never_synchronized):
                check(wrapper, make, "sgd", False)
    else:
        check(wrapper, plain, "sgd", False)
        # Torch has no norm over DTensors of two meshes.
        if wrapper != "fsdp2 x tp":
            check(wrapper, clipped, "fused adamw", wrapper != "tp")
        check(wrapper, accumulated, "adamw", "tp" not in wrapper)
        if wrapper in ("fsdp2", "ddp", "fsdp2 x tp"):
            check(wrapper, accumulated_locally, "sgd", "tp" not in wrapper)
        # DDP calls such hooks before it averages.
        if wrapper in ("tp", "fsdp2"):
            check(wrapper, updated_in_backward, "sgd", False)
    dist.destroy_process_group()
