import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.rewrite import AllReduceSlice
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional


def reduced(x, op="sum"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, "0"))


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_own_chunks_are_scattered(on_all_ranks, dim, op):
    def program(rank, x):
        return reduced(x, op).chunk(4, dim)[rank] + 1

    record, _, _ = on_all_ranks(AllReduceSlice(), program, [8, 4, 8], exact=False, dtensor=True)
    assert record.counters == {"all_reduces_replaced": 1, "bytes_saved": 768}


def test_graph(on_all_ranks):
    def program(rank, x):
        return reduced(x).chunk(4, 1)[rank] + 1

    _, graph, _ = on_all_ranks(AllReduceSlice(), program, [4, 8], exact=False, dtensor=True)
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [4, 8]
reshape_default: [4, 4, 2] = reshape(arg0_1, [4, 4, 2])
permute_default: [4, 4, 2] = permute(reshape_default, [1, 0, 2])
clone_default: [4, 4, 2] = clone(permute_default, memory_format=torch.contiguous_format)
view_default: [16, 2] = view(clone_default, [16, 2])
reduce_scatter_tensor_default: [4, 2] = reduce_scatter_tensor(view_default, sum, 4, 0)
wait_tensor_default: [4, 2] = wait_tensor(reduce_scatter_tensor_default)
add: [4, 2] = add(wait_tensor_default, 1)
return add""",
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda rank, x: reduced(x).chunk(4)[
            0
        ],  # everybody takes the first: rank 0 must not think it its own
        lambda rank, x: reduced(x).chunk(4)[(rank + 1) % 4],
        lambda rank, x: (lambda y: (y.chunk(4)[rank], y.sum()))(reduced(x)),
        lambda rank, x: reduced(x).chunk(2)[rank // 2],
    ],
)
def test_other_slices_are_left_alone(on_all_ranks, program):
    record, _, _ = on_all_ranks(AllReduceSlice(), program, [8, 4])
    assert not record.changed
