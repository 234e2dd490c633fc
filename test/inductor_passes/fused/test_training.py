"""Forward and backward graphs of tensor-parallel DTensor programs, as passes get them: what is
fused, and to what.
"""

import copy

import pytest
import torch
from torch import fx
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from inductor_passes.fused import FUSIONS
from inductor_passes.graph.collectives import launches
from inductor_passes.inductor.graph_module import capturing
from inductor_passes.testing import run_on_ranks

FUSED = ["all_gather_matmul", "matmul_reduce_scatter"]


def sequence_parallel(mesh, x, up, down):
    x, up, down = (
        DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        for local, dim in ((x, 0), (up, 1), (down, 0))
    )
    hidden = torch.relu(x.redistribute(placements=[Replicate()]) @ up)
    return (hidden @ down).redistribute(placements=[Shard(0)]).to_local()


def row_parallel_and_norm(mesh, hidden, down, residual, weight):
    placed = [Shard(1), Shard(0), Replicate(), Replicate()]
    hidden, down, residual, weight = (
        DTensor.from_local(local, mesh, [placement], run_check=False)
        for local, placement in zip((hidden, down, residual, weight), placed, strict=True)
    )
    total = (hidden @ down).redistribute(placements=[Replicate()]) + residual
    normed = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, 1e-6)
    return normed.to_local(), total.to_local()


def graphs(fn, world, shapes, dtype):
    mesh = init_device_mesh("cpu", (world,))
    torch._dynamo.reset()
    with capturing() as (backend, found):
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        torch.compile(lambda *given: fn(mesh, *given), backend=backend, fullgraph=True)(*inputs)
    return {captured.phase: captured.graph for captured in found}


def kernels(graph):
    return [
        node for node in graph.nodes if getattr(node.target, "namespace", "") == "inductor_passes"
    ]


@pytest.fixture
def fuse_all(fuse):
    def run(graph):
        return [note for fusion in FUSIONS for note in fuse(fusion, graph).notes]

    return run


@pytest.mark.parametrize(
    ("fn", "shapes", "forward", "backward"),
    [
        (sequence_parallel, ((1024, 8192), (8192, 1024), (1024, 8192)), FUSED, FUSED),
        (
            row_parallel_and_norm,
            ((512, 1024), (1024, 8192), (512, 8192), (8192,)),
            ["all_reduce_add_rmsnorm"],
            [],
        ),
    ],
)
def test_both_passes_are_fused(fuse_all, world, fn, shapes, forward, backward):
    found = graphs(fn, world, shapes, torch.bfloat16)
    for phase, wanted in (("forward", forward), ("backward", backward)):
        notes = fuse_all(found[phase])
        assert [kernel.target._opname for kernel in kernels(found[phase])] == wanted
        assert [note.split()[0] for note in notes] == ["fused"] * len(wanted)
        assert all("test_training.py" in note for note in notes), notes  # the user's lines
        assert not list(launches(found[phase]))


def test_backward_of_a_sharded_product_needs_the_gathered_rows(fuse_all, world):
    found = graphs(
        sequence_parallel, world, ((1024, 8192), (8192, 1024), (1024, 8192)), torch.bfloat16
    )
    fuse_all(found["backward"])
    gather, _ = kernels(found["backward"])
    assert gather.args[4] is True
    assert [list(value.shape) for value in gather.meta["val"]] == [[8192, 1024], [8192, 8192]]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (sequence_parallel, ((4, 64), (64, 16), (16, 64))),
        (row_parallel_and_norm, ((16, 16), (16, 32), (16, 32), (32,))),
    ],
)
def test_results_equal_on_all_ranks(fuse_all, world, references, fn, shapes):
    torch.manual_seed(0)
    for graph in graphs(fn, world, shapes, torch.float32).values():
        output = graph.output_node()  # a mesh has no gradient
        output.args = ([value for value in output.args[0] if value is not None],)
        after = fx.GraphModule({}, copy.deepcopy(graph)).graph
        fused = [note for note in fuse_all(after) if note.startswith("fused")]
        assert len(fused) == len(list(launches(graph)))
        for node in kernels(after):
            node.target = references[node.target._opname]
        inputs = []
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            inputs.append([torch.rand(shape) / 4 for _ in range(world)])
        got, wanted = run_on_ranks(after, *inputs), run_on_ranks(graph, *inputs)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
