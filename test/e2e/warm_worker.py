"""One rank of ``test_warm_starts.py``: programs whose compiled code a later process of this rank
finds in the cache.

Each function of ``CASES`` returns whether its compiled numbers are eager's. What a rank found, with
what torch counted of its caches, is written to ``<rank>.json`` in the folder of the first argument.
With ``ARTEFACTS=save`` what torch's ``save_cache_artifacts`` gives goes to ``<rank>.artefacts``
there, with ``load`` its ``load_cache_artifacts`` takes it. Kernels are Python
(``test/support/fuzzing/without_cpp.py``); all else is Inductor's.
"""

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from inductor_passes.inductor import session as attached
from inductor_passes.testing import leave_process
from inductor_passes.torch_compat import meshes

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzzing.without_cpp import without_cpp


def step(function, *inputs):
    """Outputs and gradients of the inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum(out.square().sum() for out in outs).backward()
    return [*outs, *(leaf.grad for leaf in leaves)]


def same(function, *inputs):
    found = step(torch.compile(function, backend="dynamo_dist", fullgraph=True), *inputs)
    return all(
        torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(found, step(function, *inputs), strict=True)
    )


def tensor_parallel(mesh):
    mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return same(mlp, torch.randn(4, 16))


def rows_of_its_own(mesh, rows=4):
    """Which rows a rank has is a number in its graph."""

    def function(x):
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0)]).to_local() * 2

    return same(function, torch.randn(rows, 3))


def uneven_rows(mesh):
    return rows_of_its_own(mesh, 5)


def a_dtensor_that_leaves(mesh):
    """Its mesh works as the program's own: beside other DTensors, with its groups, and sliced."""

    def function(x):
        return (x * 2).redistribute(placements=[Replicate(), Shard(0)])

    mesh = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    x = DTensor.from_local(torch.randn(4, 4), mesh, [Replicate(), Shard(1)], run_check=False)
    with torch.no_grad():
        out = torch.compile(function, backend="dynamo_dist", fullgraph=True)(x)
        summed = torch.ones(1)
        dist.all_reduce(summed, group=out.device_mesh["tp"].get_group())
        return (
            torch.allclose((out + x).full_tensor(), (function(x) + x).full_tensor())
            and out.device_mesh == mesh
            and summed.item() == mesh["tp"].size()
        )


def trained_alike(wrap):
    """Whether a model that is wrapped trains, on batches that ranks do not share, as one whose
    gradients are averaged by hand.
    """
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU()) for _ in range(1)))
    model.append(nn.Linear(32, 16))
    x, plain = torch.randn(4, 16) + dist.get_rank(), copy.deepcopy(model)
    net = wrap(model)
    found = [trained(each, x) for each in (plain, torch.compile(net, backend="dynamo_dist"))]
    for grad in found[0][1:]:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return all(
        torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(*found, strict=True)
    )


def trained(net, x):
    """Output and gradients, whole."""
    out = net(x)
    out.square().sum().backward()
    grads = (param.grad for param in net.parameters())
    return [out, *(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)]


def sharded_blocks(mesh):
    """Of parameters that are DTensors: the mesh of each is an input of the graph."""
    mesh = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "tp"))

    def wrap(model):
        parallelize_module(model, mesh["tp"], {"0.0": ColwiseParallel(), "1": RowwiseParallel()})
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    return trained_alike(wrap)


def averaged(mesh):
    return trained_alike(DistributedDataParallel)


CASES = (
    tensor_parallel,
    rows_of_its_own,
    uneven_rows,
    a_dtensor_that_leaves,
    sharded_blocks,
    averaged,
)


def ran(case, mesh):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    with lowerings() as lowered:
        right = case(mesh)
    hits, misses = (
        [
            counters["aot_autograd"][f"autograd_cache_{what}"],
            counters["inductor"][f"fxgraph_cache_{what}"],
        ]
        for what in ("hit", "miss")
    )
    return {"right": bool(right), "hits": hits, "misses": misses, "lowered": len(lowered)}


@contextlib.contextmanager
def lowerings():
    """Graphs that Inductor lowers in the block, as a list that grows."""
    found, upstream = [], GraphLowering.run

    def run(self, *args, **kwargs):
        found.append(self)
        return upstream(self, *args, **kwargs)

    with mock.patch.object(GraphLowering, "run", run):
        yield found


@contextlib.contextmanager
def no_rank_in_keys():
    """The fault that tests plant."""
    rank = {"_rank", "_coordinate_on_dim", "_dim_group_names"}
    with (
        mock.patch.object(attached.caches, "keyed_by_rank", contextlib.nullcontext),
        mock.patch.object(meshes, "_NOT_CONTENT", (*meshes._NOT_CONTENT, *rank)),
    ):
        yield


def main(folder, planted, artefacts):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    saved = Path(folder, f"{dist.get_rank()}.artefacts")
    if artefacts == "load":
        assert torch.compiler.load_cache_artifacts(saved.read_bytes()) is not None
    with without_cpp(), no_rank_in_keys() if planted else contextlib.nullcontext():
        cases = [rows_of_its_own] if planted else CASES
        found = {case.__name__: ran(case, mesh) for case in cases}
    if artefacts == "save":
        content, _ = torch.compiler.save_cache_artifacts()
        saved.write_bytes(content)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    leave_process()


main(sys.argv[1], os.environ.get("PLANTED") == "1", os.environ.get("ARTEFACTS"))
