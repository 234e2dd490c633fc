"""``data_parallel`` beside torch's ``fully_shard`` and DDP on four gloo ranks; exits with 1 if a loss differs.

Every rank trains on a batch of its own. A scenario trains twenty steps each way, from equal
weights, and compares the losses and the whole weights at the end.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from inductor_passes.testing import leave_process

STEPS = 20

dist.init_process_group("gloo")
rank = dist.get_rank()
line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


class Block(nn.Module):
    """A pre-norm MLP; four ranks share 10 rows as 3, 3, 3 and 1."""

    def __init__(self, width=10, hidden=24):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Its head has three rows: the last of four ranks holds none."""

    def __init__(self, width=10, recompute=False):
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.recompute = recompute

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def net(**kwargs):
    torch.manual_seed(1)
    return Net(**kwargs)


def batches(ranks, micro=1):
    """Equal for the ranks that share a value of ``ranks`` (tensor parallel ones)."""
    generator = torch.Generator().manual_seed(100 + ranks)
    for _ in range(STEPS):
        yield [torch.randn(5, 6, generator=generator) for _ in range(micro)]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(model, ranks=rank, micro=1, clip=None, foreach=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    losses = []
    for inputs in batches(ranks, micro):
        for x in inputs:
            loss = model(x).square().mean() / micro
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(whole(nn.utils.clip_grad_norm_(model.parameters(), clip)).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [whole(param).detach().clone() for param in model.parameters()]
    return torch.tensor(losses), weights


def ours(model, mesh, **kwargs):
    with dynamo_dist.enabled():
        dynamo_dist.data_parallel(model, mesh, **kwargs)
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def theirs(model, mesh, **kwargs):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def close(pair, other, tolerance=1e-6):
    (losses, weights), (losses2, weights2) = pair, other
    torch.testing.assert_close(losses, losses2, rtol=tolerance, atol=tolerance)
    for mine, their in zip(weights, weights2, strict=True):
        torch.testing.assert_close(mine, their, rtol=20 * tolerance, atol=20 * tolerance)


def fully_sharded():
    close(train(ours(net(), line)), train(theirs(net(), line)))


def kept_whole_until_backward():
    model = ours(net(), line, reshard_after_forward=False)
    close(train(model), train(theirs(net(), line, reshard_after_forward=False)))


def eager_mode():
    model = dynamo_dist.data_parallel(net(), line)
    close(train(model), train(theirs(net(), line)))


def hybrid():
    model = ours(net(), grid, mode="hybrid")
    close(train(model), train(theirs(net(), grid)))


def replicated():
    model = ours(net(), line, mode="replicate")
    close(train(model), train(DistributedDataParallel(net())))


def accumulated_and_clipped():
    how = {"micro": 3, "clip": 0.1}
    close(train(ours(net(), line), **how), train(theirs(net(), line), **how))


def mixed_precision():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    reference = theirs(net(), line, mp_policy=MixedPrecisionPolicy(**dtypes))
    close(train(ours(net(), line, **dtypes)), train(reference), 3e-2)


def recomputed_activations():
    close(train(ours(net(recompute=True), line)), train(theirs(net(), line)))


def with_tensor_parallel():
    model = ours(tensor_parallel(net(), grid["inner"]), grid["outer"])
    here = grid.get_local_rank("outer")
    # Parameters of two meshes: one list would mix them, in torch's fully_shard too.
    how = {"ranks": here, "foreach": False}
    reference = DistributedDataParallel(net(), process_group=grid.get_group("outer"))
    close(train(model, **how), train(reference, **how), 1e-5)


def from_meta_device():
    with torch.device("meta"):
        model = Net()
    dynamo_dist.data_parallel(model, line)
    model.to_empty(device="cpu")
    source = net()
    with torch.no_grad():
        for param, value in zip(model.parameters(), source.parameters(), strict=True):
            param.copy_(distribute_tensor(value, param.device_mesh, param.placements))
    model = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(train(model), train(theirs(net(), line)))


def checkpoints():
    model = dynamo_dist.data_parallel(net(), line)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    reference = theirs(net(), line)
    assert list(reference.state_dict()) == list(model.state_dict())
    state = {"model": reference.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    reference.load_state_dict(state["model"])
    again = dynamo_dist.data_parallel(net(), line)
    copied = copy.deepcopy(model)
    again.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    expected = train(reference)
    close(train(compiled), expected)
    close(train(torch.compile(again, backend="aot_eager", fullgraph=True)), expected)
    close(train(copied), expected)


SCENARIOS = [
    fully_sharded,
    kept_whole_until_backward,
    eager_mode,
    hybrid,
    replicated,
    accumulated_and_clipped,
    mixed_precision,
    recomputed_activations,
    with_tensor_parallel,
    from_meta_device,
    checkpoints,
]


def main():
    failed = False
    for scenario in SCENARIOS:
        if len(sys.argv) > 1 and scenario.__name__ not in sys.argv[1:]:
            continue
        torch.compiler.reset()
        try:
            scenario()
        except Exception as error:
            failed = True
            print(f"rank {rank}: {scenario.__name__}: {type(error).__name__}: {error}", flush=True)
        else:
            if rank == 0:
                print(f"{scenario.__name__}: equal", flush=True)
        dist.barrier()
    leave_process(failed)


main()
