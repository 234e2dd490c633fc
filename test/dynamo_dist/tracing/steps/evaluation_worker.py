"""Tensor parallel ranks that evaluate a model compiled by itself, then train it in a compiled step,
beside eager mode.
"""

import logging
import sys

import torch
import torch.distributed as dist
from ranks_worker import local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from inductor_passes.graph.collectives import launches
from inductor_passes.inductor import hooks
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

WIDTH, STEPS = 8, 2
AGREED = "agreed by all ranks"


class Heads(nn.Module):
    """Two networks whose sums over ranks do not wait for each other: passes merge them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)  # its gradient is a sum over ranks too
        self.one, self.other = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.stem(x)
        return self.one(x), self.other(x)


def build():
    torch.manual_seed(0)
    plan = {f"{name}.0": ColwiseParallel() for name in ("one", "other")}
    plan |= {f"{name}.2": RowwiseParallel() for name in ("one", "other")}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(Heads().double(), mesh, plan)


class Decisions(logging.Handler):
    """Keep how ranks came to the order of each graph."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        if "order of launches" in record.msg:
            self.texts.append(record.args[-1])


def run(evaluates_first, **options):
    """Losses, outputs and parameters; of eager mode without options."""
    torch.compiler.reset()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        one, other = model(x)
        loss = (one * other).square().mean() + one.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled, train_step = model, step
    if options:
        compiled = torch.compile(model, **options)
        train_step = torch.compile(step, fullgraph=True, **options)

    def evaluate():
        with torch.no_grad():
            for x in batches:
                found.extend(compiled(x))

    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)
    ]
    found = []
    if evaluates_first:
        evaluate()
    found += [train_step(x) for x in batches]
    evaluate()
    return found + [local(each.detach()) for each in model.parameters()]


def main(evaluates_first):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    decisions, counts = Decisions(), []
    hooks.log.addHandler(decisions)
    hooks.log.setLevel(logging.INFO)
    want = run(evaluates_first)
    count = {"post_grad_custom_pre_pass": lambda graph: counts.append(len(list(launches(graph))))}
    with recorder.records_of_block() as records, graph_passes_only():
        found = run(evaluates_first, backend="dynamo_dist", options=count)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
    assert decisions.texts == [AGREED, AGREED], decisions.texts
    # Of the evaluation and of the step.
    assert sorted(counts) == [2, 4]
    assert sorted(len(record.collectives) for record in records) == [1, 2]
    leave_process()


main(sys.argv[1] == "evaluation")
