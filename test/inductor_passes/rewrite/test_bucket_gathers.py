"""Small shards of inputs are gathered together; large ones, and what is computed first, are not."""

import pytest
import torch
from expecttest import assert_expected_inline

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


def test_rows_are_copied_out_as_they_lie():
    """A reshape of the pieces would have Inductor divide the index of each element."""
    graph = trace(lambda a, b: (gather(a), gather(b)), [2, 8], [3])
    BucketGathers().run(graph)
    assert_expected_inline(
        dump(graph),
        """\
a_1: [2, 8]
b_1: [3]
reshape_default: [16] = reshape(a_1, [-1])
reshape_default_1: [3] = reshape(b_1, [-1])
cat_default: [19] = cat([reshape_default, reshape_default_1])
all_gather_into_tensor_default: [76] = all_gather_into_tensor(cat_default, 4, 0)
wait_tensor_default: [76] = wait_tensor(all_gather_into_tensor_default)
view_default: [4, 19] = view(wait_tensor_default, [4, 19])
split_with_sizes_default: ([4, 16], [4, 3]) = split_with_sizes(view_default, [16, 3], 1)
getitem: [4, 16] = getitem(split_with_sizes_default, 0)
view_default_1: [4, 2, 8] = view(getitem, [4, 2, 8])
clone_default: [4, 2, 8] = clone(view_default_1, memory_format=torch.contiguous_format)
reshape_default_2: [8, 8] = reshape(clone_default, [8, 8])
getitem_1: [4, 3] = getitem(split_with_sizes_default, 1)
view_default_2: [4, 3] = view(getitem_1, [4, 3])
clone_default_1: [4, 3] = clone(view_default_2, memory_format=torch.contiguous_format)
reshape_default_3: [12] = reshape(clone_default_1, [12])
return (reshape_default_2, reshape_default_3)""",
    )


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
