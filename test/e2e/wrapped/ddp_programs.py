"""``DistributedDataParallel`` and both functions named ``replicate``, beside themselves in eager
mode.
"""

import functools

import nets
import torch
import torch.distributed as dist
from beside_eager import MIXED, Pair, adamw, line, micro_batches, plain, program, sgd, train
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.nn.parallel import DistributedDataParallel


class Normed(nets.Net):
    """Buffers of two dtypes, which ranks would have of their own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(nets.WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


@functools.cache
def averaged():
    return Pair(DistributedDataParallel, unequal=True, graphs=2)  # within no_sync(), and not


@program(4)
def averaged_by_four():
    train(DistributedDataParallel, optimizer=adamw, unequal=True, mixed=MIXED)


@program(2)
def averaged_first_compiled():
    averaged().train()


@program(2)
def averaged_first_eager():
    averaged().train(mixed=MIXED)


def average_last(model, is_last):
    model.require_backward_grad_sync = is_last  # as no_sync() has it


@program(2)
def not_averaged_at_first():
    averaged().train(micro_batches(average_last, "cc"), mixed=MIXED)


@program(2)
def not_averaged_at_first_and_eager():
    averaged().train(micro_batches(average_last, "ec"))


@program(2)
def not_averaged_at_first_and_compiled():
    averaged().train(micro_batches(average_last, "ce"))


@program(2)
def not_averaged_within_no_sync():
    def step(side, x, i):
        side.optimizer.zero_grad()
        with side.model.no_sync():
            first = side.call(x).square().mean()
            first.backward()
        second = side.call(-x).square().mean()
        second.backward()
        side.optimizer.step()
        return first + second

    averaged().train(step, optimizer=adamw, mixed=MIXED)


@functools.cache
def normed():
    return Pair(DistributedDataParallel, Normed, graphs=2)  # for training and evaluation


@program(2)
def buffers():
    normed().train(mixed=MIXED)


@program(2)
def evaluated_on_the_first_rank_alone():
    def step(side, x, i):
        loss = plain(side, x, i)
        if i % 4 == 0:
            side.model.eval()
            with torch.no_grad():
                side.call(x)  # all ranks: buffers are shared once more
                if dist.get_rank() == 0:
                    loss = loss + side.call(x).sum()
            side.model.train()
        return loss

    normed().train(step, mixed=(1, 4))


@program(2, sweep=True)
def buffers_of_each_rank():
    def wrap(model):
        return DistributedDataParallel(model, broadcast_buffers=False)

    train(wrap, Normed, unequal=True)


@program(2)
def parameters_without_use():
    class Half(nets.Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(nets.WIDTH, 4)

    def wrap(model):
        return DistributedDataParallel(model, find_unused_parameters=True)

    train(wrap, Half, mixed=MIXED)


@program(2, sweep=True)
def gradients_are_views_of_buckets():
    def wrap(model):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    train(wrap, dtype=torch.float64, mixed=MIXED)


@program(2, sweep=True)
def static():
    def wrap(model):
        return DistributedDataParallel(model, static_graph=True)

    train(wrap, mixed=(0, 1, 7), unequal=True, dtype=torch.float64)


@program(2, sweep=True)
def frozen_and_recomputed():
    def net():
        model = nets.Recomputes()
        model.head.requires_grad_(False)
        return model

    train(
        DistributedDataParallel,
        net,
        optimizer=lambda params: sgd([p for p in params if p.requires_grad]),
        unequal=True,
        mixed=MIXED,
    )


@program(2, sweep=True)
def replicated():
    train(lambda model: replicate(model), mixed=MIXED, dtype=torch.float64)


@program(2)
def replicated_with_fsdp():
    def wrap(model):
        mesh = line()
        for block in model.blocks:
            replicate_with_fsdp(block, mesh=mesh)
        return replicate_with_fsdp(model, mesh=mesh)

    train(wrap, unequal=True, mixed=MIXED)
