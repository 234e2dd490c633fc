"""One rank of ``test_shared_compile.py``: programs of which one rank compiles what all have.

Each function of ``CASES`` returns whether its compiled numbers are eager's. Who compiled which
graph is what the reports say of caches. Kernels are Python
(``test/support/fuzzing/without_cpp.py``); all else is Inductor's.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dynamo_dist
from inductor_passes.inductor import shared_trace
from inductor_passes.inductor.cache_keys import TracedProgram
from inductor_passes.ranks import compile_once
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzzing.without_cpp import without_cpp


def compiled(function):
    # Ranks of one cache folder share without being asked.
    options = {"compile": "shared"} if sys.argv[2] == "apart" else {}
    return torch.compile(function, backend="dynamo_dist", options=options)


def tensor_parallel(mesh, rows=4):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(rows, 16)

    def step(function):
        out = function(x)
        out.square().mean().backward()
        found = [out.detach(), *(p.grad.to_local() for p in mlp.parameters())]
        mlp.zero_grad()
        return found

    pairs = zip(step(mlp), step(compiled(mlp)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def trained(function, x):
    out = function(x)
    value = out.full_tensor() if isinstance(out, DTensor) else out
    value.square().sum().backward()
    grad, x.grad = x.grad, None
    return out, value.detach(), grad


def its_own_mesh_in_a_result(mesh):
    """What comes of one rank's code on another holds that rank's place in the mesh."""

    local = torch.randn(3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    weight = DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False)

    def function(x):
        return (x @ weight).sin()

    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh["tp"], [Replicate()])
    x.requires_grad_()
    _, *expected = trained(function, x)
    out, *found = trained(compiled(function), x)
    pairs = zip((found[0], found[1].to_local()), (expected[0], expected[1].to_local()), strict=True)
    at = mesh["tp"].get_coordinate()
    places = [each.device_mesh.get_coordinate() for each in (out, found[1])]
    return all(torch.allclose(a, b) for a, b in pairs) and places == [at, at]


def its_own_place_in_training(mesh):
    """The coordinate is a number in the joint graph."""

    def function(x):
        return (x * (mesh.get_local_rank("tp") + 1)).sin()

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, found = trained(function, x), trained(compiled(function), x)
    return all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def over_both_dimensions(mesh):
    """Reduces over the rows and over the columns of the mesh, whose groups have other names on
    each rank.
    """
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0), Shard(1)], run_check=False)

    def function(x):
        return x.sum(0).redistribute(placements=[Replicate(), Replicate()]).to_local() * 2

    return torch.allclose(function(x), compiled(function)(x), atol=1e-4)


def rank_read(mesh):
    def function(x):
        return x + dist.get_rank() * 2

    x = torch.ones(3)
    return torch.equal(function(x), compiled(function)(x))


def rank_of_a_dimension(mesh):
    def function(x):
        return x * (mesh.get_local_rank("tp") + 1)

    x = torch.ones(3)
    return torch.equal(function(x), compiled(function)(x))


def coordinate(mesh):
    def function(x):
        return x * (mesh.get_coordinate()[0] + 1)

    x = torch.ones(3)
    return torch.equal(function(x), compiled(function)(x))


def environment(mesh):
    def function(x):
        return x + int(os.environ["RANK"])

    x = torch.ones(3)
    return torch.equal(function(x), compiled(function)(x))


def own_rows(mesh):
    """Which rows a rank has is a number in its graph."""

    def function(x):
        whole = DTensor.from_local(x, mesh["tp"], [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0)]).to_local() * 2

    x = torch.randn(4, 3)
    return torch.equal(function(x), compiled(function)(x))


def vocabulary(mesh):
    """Which words a rank has the rows of is nowhere in Dynamo's graph."""
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(16, 6))
    parallelize_module(words, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
    ids = torch.arange(16).view(4, 4)

    def step(function):
        out = function(ids)
        out.square().sum().backward()
        found = [out.detach(), *(p.grad.to_local() for p in words.parameters())]
        words.zero_grad()
        return found

    return all(map(torch.allclose, step(words), step(compiled(words))))


def uneven_inside(mesh):
    """So are the shards of a value in between; eager mode has found its layouts before the
    compile.
    """
    local = torch.randn(2, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False).requires_grad_()

    def function(x):
        return (x * 2).redistribute(placements=[Shard(1)]).sin()

    _, *expected = trained(function, x)
    _, *found = trained(compiled(function), x)
    pairs = zip((expected[0], expected[1].to_local()), (found[0], found[1].to_local()), strict=True)
    return all(torch.allclose(a, b) for a, b in pairs)


_library = torch.library.Library("shared_worker", "DEF")
_library.define("times_rank(Tensor x) -> Tensor")
_library.impl("times_rank", lambda x: x * (PLACE["rank"] + 1), "CompositeImplicitAutograd")
PLACE = {"rank": 0}


def operator_of_a_user(mesh):
    """Made of others by what only AOTAutograd runs, with the rank where nobody notices that it
    is read.
    """
    PLACE["rank"] = dist.get_rank()

    def function(x):
        return torch.ops.shared_worker.times_rank(x) * 2

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, found = trained(function, x), trained(compiled(function), x)
    return all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def a_longer_batch_on_one_row(mesh):
    return tensor_parallel(mesh, 4 if mesh.get_local_rank("dp") == 0 else 6)


def an_error_in_the_compile(mesh):
    """The rank that compiles fails, the others compile by themselves and fail or not as they do."""
    from inductor_passes.inductor.hooks import Attachment

    improve = Attachment.improve

    def fail(self, *args, **kwargs):
        if self.session.lowering._claim is not None:
            raise MemoryError("planted")
        return improve(self, *args, **kwargs)

    failed = False
    with mock.patch.object(Attachment, "improve", fail):
        try:
            right = rank_free(mesh)
        except Exception as error:
            failed = right = "planted" in str(error)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, failed)
    return right and sum(told) == 1


def rank_free(mesh):
    def function(x):
        return DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False).to_local() * 3

    x = torch.ones(3)
    return torch.equal(function(x), compiled(function)(x))


CASES = (
    *(tensor_parallel, over_both_dimensions, a_longer_batch_on_one_row),
    *(rank_read, rank_of_a_dimension, coordinate, environment, own_rows),
    *(its_own_mesh_in_a_result, its_own_place_in_training),
    *(vocabulary, uneven_inside, operator_of_a_user),
    an_error_in_the_compile,
)
ALONE = (tensor_parallel,)


def ran(case, mesh):
    torch.compiler.reset()
    dist.barrier()
    lowered = []
    lower = GraphLowering.compile_to_module

    def counted(self):
        lowered.append(self)
        return lower(self)

    partition = mock.patch.object(compile_fx, PARTITION, wraps=getattr(compile_fx, PARTITION))
    with (
        recorder.records_of_block() as records,
        mock.patch.object(GraphLowering, "compile_to_module", counted),
        partition as partitioned,
        mock.patch.object(shared_trace, "TracedProgram", wraps=TracedProgram) as traced,
    ):
        begun = time.monotonic()
        right = case(mesh)
        seconds = time.monotonic() - begun
    caches = [str(each.cache) for each in records]
    done = {"seconds": seconds, "lowered": len(lowered), "partitioned": partitioned.call_count}
    return {"right": bool(right), "caches": caches, "traced": traced.call_count, **done}


PARTITION = "min_cut_rematerialization_partition"


def killed_in_training(mesh, rank):
    """The same while it makes the code of a joint graph."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def function(x):
        return DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False).to_local().sin() * 3

    x = torch.arange(4.0).requires_grad_()
    begun = time.monotonic()
    if rank == 3:
        with mock.patch.object(compile_fx, PARTITION, die):
            compiled(function)(x)
    time.sleep(2)  # let that one come first
    expected, found = trained(function, x), trained(compiled(function), x)
    right = all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    return {"right": right, "caches": [], "seconds": time.monotonic() - begun}


def killed_at_its_end(mesh, rank):
    """The rank that has compiled is killed before the others hear of it."""

    def die(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(compile_once.Claim, "end", die):
        tensor_parallel(mesh)


def killed(mesh, rank):
    """The rank that compiles first is killed while it does; what the others compiled, and how
    long that took.
    """
    from inductor_passes.inductor.hooks import Attachment

    def die(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    x = torch.ones(4)

    def function(x):
        return DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False).to_local() * 3

    begun = time.monotonic()
    if rank == 3:
        with mock.patch.object(Attachment, "improve", die):
            compiled(function)(x)
    time.sleep(2)  # let that one come first
    with recorder.records_of_block() as records:
        right = torch.equal(compiled(function)(x), x * 3)
    caches = [str(each.cache) for each in records]
    return {"right": right, "caches": caches, "seconds": time.monotonic() - begun}


DYING = {
    "killed": killed,
    "killed in training": killed_in_training,
    "killed at its end": killed_at_its_end,
}


def main(folder, what):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dynamo_dist.enable()
    with without_cpp():
        if what in DYING:
            found = {"killed": DYING[what](mesh, rank)}
        else:
            found = {
                case.__name__: ran(case, mesh) for case in (CASES if what == "together" else ALONE)
            }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if what not in DYING:
        dist.barrier()
    leave_process()


main(*sys.argv[1:])
