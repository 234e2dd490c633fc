"""FSDP2 on two gloo ranks within memory budgets that differ by rank, beside eager mode."""

import functools

import torch
import torch.distributed as dist
from ranks_worker import local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_step import Gated, plain_step

from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

WIDTH, LAYERS = 32, 4
KEEP = "keep_within_budget"


def within_a_budget(step, x):
    return step(x)


def beside_unlike_rows(step, x):
    return step(x)


def trained(rows, function=None, budget=None):
    """Losses and parameters after three steps, and what was decided; of eager mode without a
    function.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(WIDTH) for _ in range(LAYERS))).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    run = step = plain_step(model, torch.optim.SGD(model.parameters(), 0.1))
    if function is not None:
        options = {"memory": budget}
        compiled = torch.compile(function, backend="dynamo_dist", fullgraph=True, options=options)
        run = functools.partial(compiled, step)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    with recorder.records_of_block() as records, graph_passes_only():
        losses = [run(x) for x in batches]
    found = [each for record in records for each in record.passes if each.name == KEEP]
    return [*losses, *map(local, model.parameters())], [each.counters for each in found]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    second = dist.get_rank() == 1
    decided = []
    for function, budget, rows in (
        (within_a_budget, "100MiB", 256),
        (within_a_budget, "900KiB" if second else "2MiB", 256),
        (beside_unlike_rows, "900KiB", 64 if second else 256),
    ):
        want, _ = trained(rows)
        found, counters = trained(rows, function, budget)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
        decided += counters
    others = [None, None]
    dist.all_gather_object(others, decided)
    one, other = others
    assert one[:2] == other[:2]
    # With fewer rows less is computed again, and nothing else is gathered.
    assert one[2] != other[2] and one[2]["gathered_again"] == other[2]["gathered_again"]
    assert one[0]["gathered_again"] == 0 < one[1]["gathered_again"]
    assert one[0]["kept"] > one[1]["kept"]
    leave_process()


main()
