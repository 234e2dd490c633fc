"""One rank of ``test_pipelining.py``: schedules of ``torch.distributed.pipelining`` with
compiled stages, beside eager ones.
"""

import contextlib
import datetime
import json
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import leave_process

STEPS, MICRO_BATCHES, ROWS, WIDTH = 4, 4, 8, 8
# By name, the number of stages a rank; these split the backward of a stage in two.
STAGES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
ZERO_BUBBLE = {"ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Pipeline:
    """This rank's stages of a model under one schedule; with ``tp`` each is tensor parallel."""

    def __init__(self, name, pp, tp, compiles):
        torch.manual_seed(0)
        ranks, rank, each = pp.size(), pp.get_local_rank(), STAGES[name]
        blocks = [Block() for _ in range(ranks * each)]
        places = [rank + at * ranks for at in range(each)]
        self.last = rank == ranks - 1
        if name == "ScheduleZBVZeroBubble":  # down the ranks and up again
            places, self.last = [rank, 2 * ranks - 1 - rank], rank == 0
        self.first = rank == 0
        self.modules = [blocks[place] for place in places]
        for module in self.modules:
            if tp is not None:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(module, tp, plan)
            if compiles:
                module.compile(backend="dynamo_dist", fullgraph=True)
        stages = [
            PipelineStage(module, place, len(blocks), torch.device("cpu"), group=pp.get_group())
            for module, place in zip(self.modules, places, strict=True)
        ]
        schedule = getattr(schedules, name)
        self.schedule = schedule(
            stages if each > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=_loss
        )
        self.optimizer = torch.optim.SGD(
            [param for module in self.modules for param in module.parameters()], lr=0.1
        )

    def train(self):
        """Losses of this rank's last stage, and its parameters, local, after all steps."""
        found = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
            losses = []
            asked = {"target": target, "losses": losses} if self.last else {}
            self.schedule.step(*([x] if self.first else []), **asked)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found += [loss.detach() for loss in losses]
        return found, self.values()

    def values(self):
        """Parameters of this rank's stages, local."""
        params = self.optimizer.param_groups[0]["params"]
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in params]


def _loss(output, target):
    return (output - target).square().mean()


def run(case):
    name, _, how = case.partition(":")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "tp"))
    pp, tp = (mesh["pp"], mesh["tp"]) if how == "tp" else (init_device_mesh("cpu", (ranks,)), None)
    losses, params = Pipeline(name, pp, tp, compiles=False).train()
    torch.compiler.reset()
    counters.clear()
    with contextlib.ExitStack() as stack:
        if how != "inductor":
            stack.enter_context(graph_passes_only())
        if name in ZERO_BUBBLE:  # a stage's backward runs twice, for inputs and for weights
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        pipeline = Pipeline(name, pp, tp, compiles=True)
        start = [each.clone() for each in pipeline.values()]
        found, trained = pipeline.train()
    # Stages whose guards are alike share a graph.
    assert 1 <= counters["stats"]["unique_graphs"] <= len(pipeline.modules), counters["stats"]
    assert not counters["graph_break"]
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(trained, params, rtol=1e-6, atol=1e-6)
    assert len(losses) == (STEPS * MICRO_BATCHES if pipeline.last else 0)
    assert not any(map(torch.equal, start, trained))


def main():
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
    dynamo_dist.enable()
    results = {}
    for case in cases:
        try:
            run(case)
            results[case] = "ok"
        except BaseException:
            results[case] = traceback.format_exc()
        with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
            json.dump(results, file)
        dist.barrier()


main()
leave_process()
