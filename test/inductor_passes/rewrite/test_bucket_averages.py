"""Averages of gradients travel in buckets, whatever a start costs by the topology."""

import pytest
import torch

from inductor_passes.graph.collectives import launches, payload_bytes
from inductor_passes.graph.phases import mark_phases
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_passes
from inductor_passes.rewrite import BucketAverages
from inductor_passes.rewrite.bucket import GATHERED_FOR
from inductor_passes.testing import dump, trace

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
KIB = 1 << 10


def average(x, group="0"):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group)) / 4


def payloads(graph):
    return [payload_bytes(launch) for launch in launches(graph)]


def gradients(rank, *xs):
    return [average(x * (rank + 1)).t() for x in xs]


def test_buckets_are_filled_in_order_and_the_first_is_smaller(on_all_ranks):
    pass_ = BucketAverages(first_bytes=KIB, bucket_bytes=3 * KIB)
    shapes = [[16, 8]] * 8 + [[4]]
    record, graph, moved = on_all_ranks(pass_, gradients, *shapes)
    assert moved == [8 * 512 + 16] * 2
    assert payloads(graph) == [KIB, 3 * KIB, 16]
    assert record.counters == {"launches_before": 8, "launches_after": 2}
    assert not BucketAverages(KIB, 3 * KIB).run(graph).changed


def test_what_the_update_reads_is_bucketed_too():
    def norm(*xs):
        means = [average(x * 2) for x in xs]
        return torch.stack([each.square().sum() for each in means]).sum()

    graph = trace(norm, *[[16, 8]] * 4)
    assert not BucketAverages().run(graph).changed
    for node in graph.nodes:
        is_read = node.target is aten.pow.Tensor_Scalar
        if is_read:
            break
        node.meta["autograd_backward"] = node.op != "placeholder"
    assert is_read
    assert mark_phases(graph)
    assert BucketAverages().run(graph).changed
    assert payloads(graph) == [4 * 512]


def test_ragged_shards_of_gradients_are_bucketed_too(on_all_ranks):
    def scattered(rank, *xs):
        padded = [torch.nn.functional.pad(x, [0, 0, 0, 1]) for x in xs]
        with (
            torch.fx.traceback.preserve_node_meta(),
            torch.fx.traceback.annotate({GATHERED_FOR: "m"}),
        ):
            found = [c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 4, "0")) for x in padded]
        return [x[: 1 if rank == 3 else 2] / 4 for x in found]

    _, graph, moved = on_all_ranks(BucketAverages(), scattered, *[[7, 8]] * 4)
    assert payloads(graph) == [4 * 256] and moved[0] == moved[1]


@pytest.mark.parametrize("topology", ["cpu-gloo", "h100x8"])
def test_no_topology_sends_each_gradient_alone(topology):
    def program(*xs):
        return [average(x @ x) for x in xs]

    graph = trace(program, *[[96, 96]] * 12)  # 36 KiB each: none is tiny
    run_passes(graph, PassOptions(topology=topology, schedule="off"))
    assert payloads(graph) == [12 * 36 * KIB]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: (average(x) @ y, average(y) @ x),  # read by a product
        lambda x, y: average(average(x) + y),  # one needs the other
        lambda x, y: (average(x), average(y, "1")),
        lambda x, y: (average(x), average(y.double())),
        lambda x, y: (average(x), average(y).sum()),
    ],
)
def test_what_others_wait_for_stays_alone(program):
    graph = trace(program, [8, 8], [8, 8])
    before = dump(graph)
    assert not BucketAverages().run(graph).changed and dump(graph) == before
