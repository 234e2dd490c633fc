"""One rank of ``test_compare.py``: compare a tensor-parallel MLP. ``die`` ends rank 1 on the way."""

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamo_dist
from dynamo_dist.errors import CompareError
from dynamo_dist.job import rendezvous

STEPS = 2
# Eager takes one for its numbers, two for its memory, one for its launches; the next is stock's.
DIES_IN_STEP = 5
rendezvous.GRACE_S = 5.0  # the test knows that nobody else is about to fail


def main(out, die):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    before = [p.to_local().clone() for p in model.parameters()]
    calls = []

    def loss(outputs):
        calls.append(1)
        if die and rank == 1 and len(calls) == DIES_IN_STEP:
            os._exit(3)
        return outputs.square().mean()

    x = torch.arange(64.0).view(4, 16) / 64
    try:
        found = dynamo_dist.compare(
            model, x, steps=STEPS, loss=loss, topology="h100x8", timeout_s=180
        )
    except CompareError as error:
        result = {"error": str(error)}
    else:
        same = all(
            torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)
        )
        result = {"same": same, "enabled": dynamo_dist.is_enabled(), **found.to_json()}
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(result, file)
    # A peer that died cannot take part in an orderly end.
    os._exit(0)


main(sys.argv[1], sys.argv[2] == "die")
