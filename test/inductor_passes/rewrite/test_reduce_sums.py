import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.graph.collectives import MEMBERS, launches
from inductor_passes.rewrite import ReduceSums
from inductor_passes.testing import dump, trace

c10d = torch.ops._c10d_functional


def reduced(x, op="sum"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, "0"))


def test_sum_of_two_products_is_reduced_once(on_all_ranks):
    def program(rank, x, v, w):
        return (reduced(x @ v) + reduced(x @ w)).relu()

    record, graph, payloads = on_all_ranks(
        ReduceSums(), program, [3, 8], [8, 4], [8, 4], exact=False
    )
    assert payloads == [96, 48]
    assert record.counters == {"all_reduces_removed": 1, "bytes_saved": 48}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [3, 8]
arg1_1: [8, 4]
arg2_1: [8, 4]
mm: [3, 4] = mm(arg0_1, arg1_1)
mm_1: [3, 4] = mm(arg0_1, arg2_1)
add_tensor: [3, 4] = add(mm, mm_1)
all_reduce_default: [3, 4] = all_reduce(add_tensor, sum, 0)
wait_tensor_default: [3, 4] = wait_tensor(all_reduce_default)
relu: [3, 4] = relu(wait_tensor_default)
return relu""",
    )


def test_sum_of_three_is_reduced_once(on_all_ranks):
    def program(rank, q, k, v):
        return reduced(v) + reduced(k) + reduced(q)

    record, _, payloads = on_all_ranks(ReduceSums(), program, [4], [4], [4], exact=False)
    assert record.counters == {"all_reduces_removed": 2, "bytes_saved": 32}
    assert payloads == [48, 16]


def test_averages_are_reduced_once(on_all_ranks):
    def program(rank, a, b):
        return reduced(a, "avg") + reduced(b, "avg")

    record, _, _ = on_all_ranks(ReduceSums(), program, [4], [4], exact=False)
    assert record.changed


def test_symbolic_sizes_are_reduced_once():
    graph = trace(lambda a, b: reduced(a) + reduced(a * b), [4, 8], [4, 8], dynamic=True)
    assert ReduceSums().run(graph).changed and len(launches(graph)) == 1


def test_plan_of_ranks_names_the_last_launch_alone():
    graph = trace(lambda a, b: reduced(a) + reduced(b), [4], [4])
    for number, launch in enumerate(launches(graph)):
        launch.meta[MEMBERS] = (number,)
    ReduceSums().run(graph)
    assert [launch.meta[MEMBERS] for launch in launches(graph)] == [(1,)]


@pytest.mark.parametrize(
    "program",
    [
        lambda rank, a, b: reduced(a, "max") + reduced(b, "max"),
        lambda rank, a, b: reduced(a) + reduced(b, "avg"),
        lambda rank, a, b: torch.add(reduced(a), reduced(b), alpha=2),
        lambda rank, a, b: reduced(a) + reduced(b[:1]),
        lambda rank, a, b: reduced(a) + reduced(b.double()),
        lambda rank, a, b: reduced(a) + b,
        lambda rank, a, b: (lambda one: one + one)(reduced(a)),
        lambda rank, a, b: (lambda one: (one + reduced(b), one))(reduced(a)),
    ],
    ids="maxima kinds scaled shapes types one twice two_readers".split(),
)
def test_other_sums_stay(on_all_ranks, program):
    record, _, _ = on_all_ranks(ReduceSums(), program, [4], [4])
    assert not record.changed
