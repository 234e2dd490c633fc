import pytest
import torch
from expecttest import TestCase
from programs import EVERY_KIND, GATHERS, RANKS, CoalescingCost, MergeAll, every_kind, gathers, wait

from inductor_passes.pipeline import run_pass
from inductor_passes.schedule.apply import is_coalescing_faster
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.testing import FixedCost, dump, fake_group, run_on_ranks, trace

c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def four_ranks():
    with fake_group(RANKS):
        yield


def inputs(shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [[torch.randn(*shape).to(dtype) for _ in range(RANKS)] for shape in shapes]


@pytest.mark.parametrize("program, shapes", [(gathers, GATHERS), (every_kind, EVERY_KIND)])
@pytest.mark.parametrize(
    "pass_",
    [
        ScheduleGraph(FixedCost(launch=8, mm=10)),
        MergeAll(FixedCost()),
        MergeAll(CoalescingCost()),
        MergeAll(FixedCost(), exact=True),
    ],
    ids=["solved", "packed", "coalesced", "exact"],
)
def test_every_rank_gets_the_numbers_it_had(program, shapes, pass_):
    graph = trace(program, *shapes)
    before = run_on_ranks(graph, *inputs(shapes))
    assert run_pass(pass_, graph).changed
    after = run_on_ranks(graph, *inputs(shapes))
    for old, new in zip(before, after, strict=True):
        # One process adds all ranks up in rank order, packed or not: every bit stays.
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def test_exact_merges_only_what_adds_nothing():
    graph = trace(every_kind, *EVERY_KIND)
    pass_ = MergeAll(FixedCost(), exact=True)
    record = run_pass(pass_, graph)
    assert record.numerics == "bitwise" and record.counters["buckets"] == 2
    names = [n.name for n in graph.nodes]
    assert sum(n.startswith("reduce_scatter") for n in names) == 2
    assert sum(n.startswith("all_gather") for n in names) == 1


def test_dtypes_are_kept_apart():
    def mixed(a, b):
        low = [t.to(torch.bfloat16) for t in (a, b)]
        return [wait(c10d.all_gather_into_tensor(t, RANKS, "0")) for t in (a, *low, b)]

    graph = trace(mixed, [4, 4], [4, 4])
    assert run_pass(MergeAll(FixedCost()), graph).counters == {
        "launches": 4,
        "buckets": 2,
        "merged": 4,
    }
    launched = [n.meta["val"].dtype for n in graph.nodes if n.target is GATHER]
    assert sorted(map(str, launched)) == ["torch.bfloat16", "torch.float32"]


GATHER = c10d.all_gather_into_tensor.default


def test_what_cannot_merge_stays_alone():
    def alone(a, b):
        uneven = [1, 2, 3, 2]
        swapped = [wait(c10d.all_to_all_single(t, uneven, uneven, "0")) for t in (a, b)]
        two = c10d.all_reduce_coalesced([a, b], "sum", "0")
        return *swapped, *(wait(t) for t in two)

    graph = trace(alone, [8, 2], [8, 2])
    assert run_pass(MergeAll(FixedCost()), graph).counters["buckets"] == 0


def test_copies_decide_the_style():
    launches = [n for n in trace(gathers, *GATHERS).nodes if n.target is GATHER]

    class Link(FixedCost):
        copy_bytes_per_us = 1.0

    assert not is_coalescing_faster(launches, FixedCost(launch=1))  # four starts against one
    assert is_coalescing_faster(launches, Link(launch=1))  # copies cost more than starts


class TestGraphs(TestCase):
    def test_packed_gathers(self):
        graph = trace(gathers, *GATHERS[:3])
        run_pass(MergeAll(FixedCost()), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
arg0_1: [16, 16]
arg1_1: [4, 16]
arg2_1: [4, 16]
reshape_default: [64] = reshape(arg1_1, [-1])
reshape_default_1: [64] = reshape(arg2_1, [-1])
cat_default: [128] = cat([reshape_default, reshape_default_1])
all_gather_into_tensor_default: [512] = all_gather_into_tensor(cat_default, 4, 0)
wait_tensor_default: [512] = wait_tensor(all_gather_into_tensor_default)
reshape_default_2: [4, 128] = reshape(wait_tensor_default, [4, -1])
split_with_sizes_default: ([4, 64], [4, 64]) = split_with_sizes(reshape_default_2, [64, 64], 1)
getitem: [4, 64] = getitem(split_with_sizes_default, 0)
reshape_default_3: [16, 16] = reshape(getitem, [16, 16])
getitem_1: [4, 64] = getitem(split_with_sizes_default, 1)
reshape_default_4: [16, 16] = reshape(getitem_1, [16, 16])
mm: [16, 16] = mm(arg0_1, reshape_default_3)
relu: [16, 16] = relu(mm)
mm_1: [16, 16] = mm(relu, reshape_default_4)
relu_1: [16, 16] = relu(mm_1)
return relu_1""",
        )

    def test_packed_reductions(self):
        def reduced(a, b):
            parts = [wait(c10d.reduce_scatter_tensor(t, "sum", RANKS, "0")) for t in (a, b)]
            return *parts, *(wait(c10d.all_reduce(t, "sum", "0")) for t in (a, b))

        graph = trace(reduced, [8, 3], [4])
        run_pass(MergeAll(FixedCost()), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
a_1: [8, 3]
b_1: [4]
reshape_default: [4, 6] = reshape(a_1, [4, -1])
reshape_default_1: [4, 1] = reshape(b_1, [4, -1])
cat_default: [4, 7] = cat([reshape_default, reshape_default_1], 1)
reduce_scatter_tensor_default: [1, 7] = reduce_scatter_tensor(cat_default, sum, 4, 0)
reshape_default_5: [24] = reshape(a_1, [-1])
reshape_default_6: [4] = reshape(b_1, [-1])
cat_default_1: [28] = cat([reshape_default_5, reshape_default_6])
all_reduce_default: [28] = all_reduce(cat_default_1, sum, 0)
wait_tensor_default: [1, 7] = wait_tensor(reduce_scatter_tensor_default)
reshape_default_2: [1, 7] = reshape(wait_tensor_default, [1, -1])
split_with_sizes_default: ([1, 6], [1, 1]) = split_with_sizes(reshape_default_2, [6, 1], 1)
getitem: [1, 6] = getitem(split_with_sizes_default, 0)
reshape_default_3: [2, 3] = reshape(getitem, [2, 3])
getitem_1: [1, 1] = getitem(split_with_sizes_default, 1)
reshape_default_4: [1] = reshape(getitem_1, [1])
wait_tensor_default_1: [28] = wait_tensor(all_reduce_default)
reshape_default_7: [1, 28] = reshape(wait_tensor_default_1, [1, -1])
split_with_sizes_default_1: ([1, 24], [1, 4]) = split_with_sizes(reshape_default_7, [24, 4], 1)
getitem_2: [1, 24] = getitem(split_with_sizes_default_1, 0)
reshape_default_8: [8, 3] = reshape(getitem_2, [8, 3])
getitem_3: [1, 4] = getitem(split_with_sizes_default_1, 1)
reshape_default_9: [4] = reshape(getitem_3, [4])
return (reshape_default_3, reshape_default_4, reshape_default_8, reshape_default_9)""",
        )

    def test_coalesced_gathers(self):
        graph = trace(gathers, *GATHERS[:3])
        run_pass(MergeAll(CoalescingCost()), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
arg0_1: [16, 16]
arg1_1: [4, 16]
arg2_1: [4, 16]
all_gather_into_tensor_coalesced_default: ([16, 16], [16, 16]) = all_gather_into_tensor_coalesced([arg1_1, arg2_1], 4, 0)
getitem: [16, 16] = getitem(all_gather_into_tensor_coalesced_default, 0)
getitem_1: [16, 16] = getitem(all_gather_into_tensor_coalesced_default, 1)
wait_tensor_default: [16, 16] = wait_tensor(getitem)
wait_tensor_default_1: [16, 16] = wait_tensor(getitem_1)
mm: [16, 16] = mm(arg0_1, wait_tensor_default)
relu: [16, 16] = relu(mm)
mm_1: [16, 16] = mm(relu, wait_tensor_default_1)
relu_1: [16, 16] = relu(mm_1)
return relu_1""",
        )
