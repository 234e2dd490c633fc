import pytest
import torch
from expecttest import TestCase

from inductor_passes.fused import FuseMatmulReduceScatter
from inductor_passes.testing import dump, trace

c10d, prims = torch.ops._c10d_functional, torch.ops.prims
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def reduced(x, op="sum"):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, 8, "0"))


def rows(x, w):
    return reduced(x @ w, "avg") + 1


def sequence(x, w):  # [1, sequence, hidden], scattered along the sequence
    y = (x.view(-1, x.shape[-1]) @ w.t()).view(1, x.shape[1], -1)
    return reduced(torch.cat(y.split(x.shape[1] // 8, 1)))


def read_twice(x, w):
    y = x @ w
    return reduced(y), y


def cast(x, w):
    return reduced(prims.convert_element_type.default(x @ w, torch.float32))


def largest(x, w):
    return reduced(x @ w, "max")


def no_product(x, w):
    return reduced(x + 1)


@pytest.fixture
def expect():
    return TestCase().assertExpectedInline


def test_rows(fuse, expect):
    graph = trace(rows, [8192, 1024], [1024, 8192], **BF16)
    record = fuse(FuseMatmulReduceScatter, graph)
    expect(
        "\n".join(record.notes),
        """fused reduce_scatter %reduce_scatter_tensor: 526.3 -> 427.4 us""",
    )
    expect(
        dump(graph),
        """\
x_1: [8192, 1024]
w_1: [1024, 8192]
matmul_reduce_scatter_default: [1024, 8192] = matmul_reduce_scatter(x_1, w_1, avg, 0, 8)
add: [1024, 8192] = add(matmul_reduce_scatter_default, 1)
return add""",
    )
    assert not fuse(FuseMatmulReduceScatter, graph).changed


def test_views_and_a_transposed_weight(fuse, expect):
    graph = trace(sequence, [1, 8192, 1024], [8192, 1024], **BF16)
    fuse(FuseMatmulReduceScatter, graph)
    expect(
        dump(graph),
        """\
x_1: [1, 8192, 1024]
w_1: [8192, 1024]
view: [8192, 1024] = view(x_1, [-1, 1024])
t: [1024, 8192] = t(w_1)
matmul_reduce_scatter_default: [1024, 8192] = matmul_reduce_scatter(view, t, sum, 0, 8)
reshape_default: [1, 1024, 8192] = reshape(matmul_reduce_scatter_default, [1, 1024, 8192])
return reshape_default""",
    )


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (read_twice, "read elsewhere"),
        (cast, "cast before it is reduced"),
        (largest, "sums and averages, not max"),
    ],
)
def test_what_is_declined_is_left_alone(fuse, fn, reason):
    graph = trace(fn, [8192, 1024], [1024, 8192], **BF16)
    before = dump(graph)
    record = fuse(FuseMatmulReduceScatter, graph)
    assert record.counters == {"fused": 0, "declined": 1}
    assert reason in record.notes[0]
    assert dump(graph) == before


def test_a_product_bound_by_compute_loses(fuse):
    graph = trace(rows, [8192, 32768], [32768, 8192], **BF16)
    record = fuse(FuseMatmulReduceScatter, graph)
    assert "less than 5% gained" in record.notes[0]


def test_how_a_process_multiplies_float32_decides_no_launch(fuse):
    def found():
        graph = trace(rows, [8192, 256], [256, 8192], dtype=torch.float32, device="cuda")
        return fuse(FuseMatmulReduceScatter, graph).notes, dump(graph)

    before = found()
    torch.set_float32_matmul_precision("high")
    try:
        assert found() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_no_candidate_and_no_kernel(fuse):
    graph = trace(no_product, [8192, 1024], [1024, 8192], **BF16)
    assert fuse(FuseMatmulReduceScatter, graph).notes == ()
    graph = trace(rows, [8192, 1024], [1024, 8192], **BF16)
    assert (
        "crosses hosts" in fuse(FuseMatmulReduceScatter, graph, "the group crosses hosts").notes[0]
    )


def test_results_equal_on_all_ranks(same_on_all_ranks):
    for fn, shapes in ((rows, ([16, 64], [64, 8])), (sequence, ([1, 16, 64], [8, 64]))):
        same_on_all_ranks(FuseMatmulReduceScatter, fn, *shapes)
