"""Live tensors of FSDP2's whole step on two gloo ranks within budgets, measured and predicted."""

import functools

import torch
import torch.distributed as dist
from live_memory import peak_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_step import Gated, plain_step

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

WIDTH, LAYERS, ROWS = 256, 6, 1024


def within_a_budget(step, x):
    return step(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(ROWS, WIDTH)
    peaks = []
    for mib in (None, 40, 30):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Gated(WIDTH) for _ in range(LAYERS)))
        for each in (*model, model):
            fully_shard(each, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        options = {"memory": f"{mib}MiB" if mib else None}
        how = {"backend": "dynamo_dist", "fullgraph": True, "options": options}
        compiled = torch.compile(within_a_budget, **how)
        run = functools.partial(compiled, plain_step(model, optimizer), x)
        with recorder.records_of_block() as records:
            run()
        (record,) = records
        peak = peak_bytes(run)
        assert 0.95 < peak / record.after.peak_bytes < 1.05, (mib, peak, record.after.peak_bytes)
        if mib:
            held = 3 * sum(p.to_local().nbytes for p in model.parameters()) + x.nbytes
            assert peak + held < mib * 2**20
        peaks.append(peak)
    assert peaks[0] > peaks[2] and peaks[1] > 1.2 * peaks[2]
    leave_process()


main()
