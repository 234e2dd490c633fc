"""Draws of DTensors on CUDA, in graphs of fake tensors: each shard at its own offset, drawn
once.
"""

import operator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import (
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._prims.rng_prims import run_dtensor_rng_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

pytestmark = pytest.mark.usefixtures("enabled")
WORLD = 8


class Tracker(_random.OffsetBasedRNGTracker):
    """Upstream's arithmetic, without a device to read a state from."""

    def __init__(self):
        self._device = torch.device("cuda", 0)
        self._use_distribute_region = True


@pytest.fixture(autouse=True)
def tracker(monkeypatch):
    monkeypatch.setattr(_random, "_rng_tracker", Tracker())


def draws(function, rank, shape, placements, local):
    """Start and end of every draw in the graph of ``function`` on one of 8 ranks of a mesh of
    ``shape``.
    """
    found = []

    def show(graph, inputs):
        nodes = graph.graph.find_nodes(op="call_function", target=run_dtensor_rng_op)
        found.extend(tuple(node.args[:2]) for node in nodes)
        return make_boxed_func(graph.forward)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cuda", shape)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = DTensor.from_local(torch.empty(local, device="cuda"), mesh, placements)
            backend = aot_autograd(fw_compiler=show)
            torch.compile(function, backend=backend, fullgraph=True)(x)
    finally:
        _clear_sharding_prop_cache()  # it holds meshes by equality
        dist.destroy_process_group()
        torch.compiler.reset()
    return found


def dropout(x):
    return F.dropout(x, 0.5)


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_shards_start_one_after_the_other(rank):
    assert draws(dropout, rank, (8,), [Shard(0)], (2, 8)) == [(rank * 16, 128)]
    assert draws(torch.rand_like, rank, (8,), [Shard(1)], (2, 8)) == [(rank * 16, 128)]


def test_replicas_start_together():
    assert {*draws(dropout, 0, (8,), [Replicate()], (2, 8))} == {(0, 16)}
    assert {*draws(dropout, 5, (8,), [Replicate()], (2, 8))} == {(0, 16)}


def test_replicas_of_a_shard_start_together():
    """Ranks 1 and 5 of 2 x 4 hold the same shard; 16 x 8 elements, of which each shard has 32."""
    placements = [Replicate(), Shard(0)]
    first, second = (draws(dropout, rank, (2, 4), placements, (4, 8)) for rank in (1, 5))
    assert first == second == [(32, 128)]
    assert draws(dropout, 6, (2, 4), placements, (4, 8)) == [(64, 128)]


def test_two_draws_of_one_tensor():
    found = draws(lambda x: dropout(x) + dropout(x), 1, (8,), [Shard(0)], (2, 8))
    assert found == [(16, 128), (16, 128)]


def joint_graph():
    """dropout(x) + dropout(x) on CUDA, its backward, and the block marked to be recomputed."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        like, mask = torch.empty(2, 8), torch.empty(2, 8, dtype=torch.bool)

    def node(target, *args, val=like, **meta):
        made = graph.call_function(target, args)
        made.meta.update(val=val, **meta)
        return made

    def placeholder(name):
        made = graph.placeholder(name)
        made.meta["val"] = like
        return made

    x, tangent = placeholder("primals_1"), placeholder("tangents_1")
    again = {
        "recompute": CheckpointPolicy.MUST_RECOMPUTE,
        "ac_graph_id": 1,
        "partitioner_tag": "is_forward",
    }
    aten, item = torch.ops.aten, operator.getitem
    masks, outs = [], []
    for _ in range(2):
        drawn = node(
            run_dtensor_rng_op, 16, 128, aten.native_dropout.default, x, 0.5, True,
            val=(like, mask), **again,
        )  # fmt: skip
        outs.append(node(item, drawn, 0, **again))
        masks.append(node(item, drawn, 1, val=mask, **again))
    y = node(aten.sin.default, node(aten.add.Tensor, *outs, **again), **again)
    slope = node(aten.mul.Tensor, tangent, node(aten.cos.default, y.args[0]))
    back = [node(aten.native_dropout_backward.default, slope, each, 2.0) for each in masks]
    graph.output([y, node(aten.add.Tensor, *back)])
    graph.output_node().meta["desc"] = [None, None]
    return torch.fx.GraphModule({}, graph)


def test_equal_draws_are_not_merged():
    merged = fx_graph_cse(joint_graph().graph)
    assert len(merged.find_nodes(op="call_function", target=run_dtensor_rng_op)) == 2


@pytest.mark.parametrize("split", [min_cut_rematerialization_partition, default_partition])
def test_a_checkpointed_block_does_not_draw_again(split):
    forward, backward = split(
        joint_graph(), (), num_fwd_outputs=1, static_lifetime_input_indices=[]
    )
    counts = [
        len(each.graph.find_nodes(op="call_function", target=run_dtensor_rng_op))
        for each in (forward, backward)
    ]
    assert counts == [2, 0]
