"""One rank of ``test_compare.py``: a tensor-parallel MLP side by side; exits with 1 if anything
is unexpected.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamo_dist
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
mesh = init_device_mesh("cpu", (2,))
model = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
before = [p.to_local().clone() for p in model.parameters()]
x = torch.arange(64.0).view(4, 16) / 64
BACKENDS = dynamo_dist.numerics.comparison.BACKENDS


def compare():
    return dynamo_dist.compare(
        model, x, steps=2, loss=lambda y: y.square().mean(), options={"topology": "h100x8"}
    )


found = compare()
assert found.ok and not dynamo_dist.is_enabled(), str(found)
for name, result in found.variants.items():
    assert not result.differences and len(result.step_ms) == 2
    assert result.launches == {"all_reduce": 1}  # of partial outputs; the input needs no gradient
    assert (result.graphs, result.graph_breaks) == (name != "eager", 0)
exposed_before, exposed_after = found.variants["ours"].exposed_us
assert 0 < exposed_after <= exposed_before
assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))


def wrong_on_one_rank(gm, inputs, **kwargs):
    return lambda *args: [out + (rank == 1) for out in gm(*args)]


dynamo_dist.numerics.comparison.BACKENDS = {"upstream": "eager", "ours": wrong_on_one_rank}
found = compare()
assert not found.ok
assert bool(found.variants["ours"].differences) == (rank == 1)
leave_process()
