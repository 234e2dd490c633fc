"""FSDP2 on two gloo ranks with unlike batches: AdamW's states wait on the host for their update."""

import functools

import torch
import torch.distributed as dist
from ranks_worker import local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_step import Gated, plain_step

from inductor_passes.memory import host_copies
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

WIDTH, LAYERS = 64, 4


def with_states_away(step, x):
    return step(x)


def trained(rows, budget=None):
    """Losses, parameters and states after three steps; what the compile says of states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(WIDTH) for _ in range(LAYERS))).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    run = step = plain_step(model, optimizer)
    if budget is not None:
        options = {"memory": budget, "offload": True}
        how = {"backend": "dynamo_dist", "fullgraph": True, "options": options}
        run = functools.partial(torch.compile(with_states_away, **how), step)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    with recorder.records_of_block() as records:
        losses = [run(x) for x in batches]
    notes = [note for record in records for each in record.passes for note in each.notes]
    states = [local(each) for p in model.parameters() for each in optimizer.state[p].values()]
    found = [*losses, *map(local, model.parameters()), *states]
    return found, [note for note in notes if "x optimizer state" in note]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    host_copies.SMALLEST_MOVED = 2**12
    rows = 512 if dist.get_rank() else 448
    want, _ = trained(rows)
    found, away = trained(rows, "3300KiB")
    assert away, "the budget keeps all states on the device"
    # A compiled AdamW corrects its means in float32.
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
    leave_process()


main()
