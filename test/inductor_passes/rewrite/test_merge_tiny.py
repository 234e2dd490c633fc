import torch
from expecttest import assert_expected_inline

from inductor_passes.graph.collectives import launches
from inductor_passes.rewrite import MergeTiny
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional


def reduced(x, op="sum"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, "0"))


def gather(x, ranks=4):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))


def test_norms_share_a_launch(on_all_ranks):
    def program(rank, x, y):
        return reduced(x.sum()) * 2, reduced((y * y).sum(0))

    record, graph, _ = on_all_ranks(MergeTiny(), program, [2, 8], [4, 3], exact=False)
    assert record.counters == {"launches_before": 2, "launches_after": 1}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [2, 8]
arg1_1: [4, 3]
sum_1: [] = sum(arg0_1)
mul_1: [4, 3] = mul(arg1_1, arg1_1)
sum_2: [3] = sum(mul_1, [0])
reshape_default: [1] = reshape(sum_1, [-1])
reshape_default_1: [3] = reshape(sum_2, [-1])
cat_default: [4] = cat([reshape_default, reshape_default_1])
all_reduce_default: [4] = all_reduce(cat_default, sum, 0)
wait_tensor_default: [4] = wait_tensor(all_reduce_default)
split_with_sizes_default: ([1], [3]) = split_with_sizes(wait_tensor_default, [1, 3], 0)
getitem: [1] = getitem(split_with_sizes_default, 0)
reshape_default_2: [] = reshape(getitem, [])
mul: [] = mul(reshape_default_2, 2)
getitem_1: [3] = getitem(split_with_sizes_default, 1)
reshape_default_3: [3] = reshape(getitem_1, [3])
return (mul, reshape_default_3)""",
    )


def test_gathers(on_all_ranks):
    def program(rank, x, y):
        return gather(x) + 1, gather(y) * 2

    _, graph, _ = on_all_ranks(MergeTiny(), program, [2, 8], [3])
    assert len(launches(graph)) == 1


def test_scattered_sums(on_all_ranks):
    def scattered(x):
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 4, "0"))

    def program(rank, x, y):
        return scattered(x * (rank + 1)) + 1, scattered(y).reshape(3, 1) * 2

    _, graph, _ = on_all_ranks(MergeTiny(), program, [8, 3], [12], exact=False)
    assert len(launches(graph)) == 1


def test_a_launch_that_needs_another_is_not_merged_with_it(on_all_ranks):
    def program(rank, x):
        return reduced(x / reduced(x.abs().sum()))

    record, _, _ = on_all_ranks(MergeTiny(), program, [2, 8])
    assert not record.changed


def test_two_buckets_never_need_each_other(on_all_ranks):
    """b needs a, c needs d: merged crosswise, each launch would wait for the other."""

    def program(rank, x, y):
        a = reduced(x)
        b = reduced(a * 2, "max")
        c = reduced(y, "max")
        d = reduced(c * 2)
        return b, d

    _, graph, _ = on_all_ranks(MergeTiny(), program, [2], [2], exact=False)
    assert len(launches(graph)) == 3


def test_large_ones_and_other_types_stay_alone(on_all_ranks):
    record, _, _ = on_all_ranks(
        MergeTiny(tiny_bytes=63), lambda rank, x, y: (reduced(x), reduced(y)), [2, 8], [2, 8]
    )
    assert not record.changed
    record, _, _ = on_all_ranks(
        MergeTiny(), lambda rank, x: (reduced(x), reduced(x.to(torch.float64))), [2, 8]
    )
    assert not record.changed


def test_gathers_of_inputs_keep_no_reader_waiting(on_all_ranks):
    def program(rank, x, scale, other):
        return ((x @ x) * gather(scale)).sum() + ((x * 3) @ x + gather(other)).sum()

    _, graph, _ = on_all_ranks(MergeTiny(), program, [16, 16], [4], [4])
    order = [node.name for node in graph.nodes]
    (launch,) = launches(graph)
    products = [name for name in order if name.startswith("mm")]
    # The first product is read with the first gather before the second product is made.
    assert order.index(launch.name) < order.index("mul") < order.index(products[1])
