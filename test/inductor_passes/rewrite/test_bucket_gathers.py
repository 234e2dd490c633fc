"""Small shards of inputs are gathered together; large ones, and what is computed first, are not."""

import pytest
import torch

from inductor_passes.graph.collectives import launches, payload_bytes
from inductor_passes.graph.phases import mark_phases
from inductor_passes.rewrite import BucketGathers
from inductor_passes.rewrite.bucket import GATHERED_FOR
from inductor_passes.testing import dump, trace

c10d = torch.ops._c10d_functional
KIB = 1 << 10


def gather(x, group="0", module="block"):
    with (
        torch.fx.traceback.preserve_node_meta(),
        torch.fx.traceback.annotate({GATHERED_FOR: module}),
    ):
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, group))


def payloads(graph):
    return [payload_bytes(launch) for launch in launches(graph)]


def layers(rank, x, *shards):
    for shard in shards:
        x = torch.tanh(x @ gather(shard))
    return x


def test_shards_are_gathered_together_up_to_what_may_be_held(on_all_ranks):
    pass_ = BucketGathers(held_bytes=2 * KIB)  # two of [16, 16] in float32
    record, graph, _ = on_all_ranks(pass_, layers, [4, 16], *[[4, 16]] * 5)
    assert payloads(graph) == [512, 512, 256]
    assert record.counters == {"launches_before": 4, "launches_after": 2}
    assert not BucketGathers(2 * KIB).run(graph).changed


def test_padded_shards_are_gathered_together(on_all_ranks):
    def ragged(rank, x, *shards):
        padded = [torch.nn.functional.pad(each, [0, 0, 0, 1]) for each in shards]
        return [x @ gather(each)[:7] for each in padded]

    _, graph, _ = on_all_ranks(BucketGathers(), ragged, [3, 7], *[[1, 8]] * 3)
    assert payloads(graph) == [3 * 64]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: (gather(x), gather(y, "1")),
        lambda x, y: (gather(x), gather(y.double())),
        lambda x, y: (gather(x), gather(torch.sin(y))),  # computed first
        lambda x, y: (gather(x), gather(y, module="another")),
    ],
)
def test_others_stay_alone(program):
    graph = trace(program, [8, 8], [8, 8])
    before = dump(graph)
    assert not BucketGathers().run(graph).changed and dump(graph) == before


def test_what_a_backward_gathers_again_is_no_part_of_the_forwards_bucket():
    graph = trace(lambda *shards: [gather(each) for each in shards], *[[8, 8]] * 4)
    for launch in launches(graph)[2:]:
        launch.meta["autograd_backward"] = True
    assert mark_phases(graph)
    assert BucketGathers().run(graph).changed
    assert payloads(graph) == [2 * 256] * 2
