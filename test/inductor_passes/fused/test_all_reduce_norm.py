import pytest
import torch
from expecttest import TestCase

from inductor_passes.fused import FuseAllReduceNorm
from inductor_passes.testing import dump, trace

c10d, prims = torch.ops._c10d_functional, torch.ops.prims
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
ROWS, D = 512, 8192


def to(x, dtype):
    return x if x.dtype == dtype else prims.convert_element_type.default(x, dtype)


def summed(x, op="sum"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, "0"))


def rms(total, weight):
    """As models write it: cast, then weight."""
    wide = to(total, torch.float32)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * to(wide * root, total.dtype), root


def layer(total, weight, shift):
    wide = to(total, torch.float32)
    variance, mean = torch.var_mean(wide, [wide.dim() - 1], correction=0, keepdim=True)
    normed = (wide - mean) * torch.rsqrt(variance + 1e-5)
    return to(normed * weight + shift, total.dtype), normed


def with_bias(x, bias, residual, weight):
    total = summed(x).view(8, -1, x.shape[-1]) + bias + residual
    return rms(total, weight)[0], total


def training(x, residual, weight):
    total = summed(x) + residual
    y, root = rms(total, weight)
    return y, total, root


def bare_layer(x, weight, shift):  # a backward pass reads the norm before its weight
    y, normed = layer(summed(x), weight, shift)
    return y, normed


def read_before(x, residual, weight):
    first = summed(x)
    return rms(first + residual, weight)[0], first


def average(x, residual, weight):
    return rms(summed(x, "avg") + residual, weight)[0]


def narrow_norm(x, residual, weight):
    total = summed(x) + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def two_residuals(x, residual, weight):
    return rms(summed(x) + residual + weight * residual, weight)[0]


def broadcast(x, residual, weight):
    return rms(summed(x) + residual.view(1, *residual.shape).expand(4, -1, -1), weight)[0]


def over_rows(x, residual, weight):
    total = to(summed(x) + residual, torch.float32)
    return total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-6)


def no_norm(x, residual, weight):
    return summed(x) + residual


@pytest.fixture
def expect():
    return TestCase().assertExpectedInline


def test_a_view_a_bias_and_a_residual(fuse, expect):
    graph = trace(with_bias, [ROWS, D], [D], [8, ROWS // 8, D], [D], **BF16)
    record = fuse(FuseAllReduceNorm, graph)
    expect("\n".join(record.notes), """fused all_reduce %all_reduce: 95.2 -> 73.9 us""")
    expect(
        dump(graph),
        """\
x_1: [512, 8192]
bias_1: [8192]
residual_1: [8, 64, 8192]
weight_1: [8192]
reshape_default: [8, 64, 8192] = reshape(x_1, [8, 64, 8192])
all_reduce_add_rmsnorm_default: ([8, 64, 8192], [8, 64, 8192], [8, 64, 1], [0]) = all_reduce_add_rmsnorm(reshape_default, residual_1, bias_1, weight_1, 1e-06, torch.bfloat16, 0)
getitem: [8, 64, 8192] = getitem(all_reduce_add_rmsnorm_default, 0)
getitem_1: [8, 64, 8192] = getitem(all_reduce_add_rmsnorm_default, 1)
return (getitem, getitem_1)""",
    )
    assert not fuse(FuseAllReduceNorm, graph).changed


def test_what_a_backward_pass_saves(fuse, expect):
    graph = trace(training, [ROWS, D], [ROWS, D], [D], **BF16)
    fuse(FuseAllReduceNorm, graph)
    expect(
        dump(graph),
        """\
x_1: [512, 8192]
residual_1: [512, 8192]
weight_1: [8192]
all_reduce_add_rmsnorm_default: ([512, 8192], [512, 8192], [512, 1], [0]) = all_reduce_add_rmsnorm(x_1, residual_1, None, weight_1, 1e-06, torch.bfloat16, 0)
getitem: [512, 8192] = getitem(all_reduce_add_rmsnorm_default, 0)
getitem_1: [512, 8192] = getitem(all_reduce_add_rmsnorm_default, 1)
getitem_2: [512, 1] = getitem(all_reduce_add_rmsnorm_default, 2)
return (getitem, getitem_1, getitem_2)""",
    )


def test_layer_norm_and_a_reader_inside_it(fuse, expect):
    graph = trace(bare_layer, [ROWS, D], [D], [D], **BF16)
    fuse(FuseAllReduceNorm, graph)
    expect(
        dump(graph),
        """\
x_1: [512, 8192]
weight_1: [8192]
shift_1: [8192]
all_reduce_add_layernorm_default: ([512, 8192], [512, 8192], [512, 1], [512, 1], [0]) = all_reduce_add_layernorm(x_1, None, None, None, None, 1e-05, torch.float32, 0)
getitem_2: [512, 8192] = getitem(all_reduce_add_layernorm_default, 0)
mul_1: [512, 8192] = mul(getitem_2, weight_1)
add_1: [512, 8192] = add(mul_1, shift_1)
convert_element_type_1: [512, 8192] = convert_element_type(add_1, torch.bfloat16)
return (convert_element_type_1, getitem_2)""",
    )


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (read_before, "read before everything is added"),
        (average, "sums, not avg"),
        (narrow_norm, "the norm torch.bfloat16"),
        (two_residuals, "not one bias and one residual"),
        (broadcast, "the sum is broadcast"),
    ],
)
def test_what_is_declined_is_left_alone(fuse, fn, reason):
    graph = trace(fn, [ROWS, D], [ROWS, D], [D], **BF16)
    before = dump(graph)
    record = fuse(FuseAllReduceNorm, graph)
    assert record.counters == {"fused": 0, "declined": 1}
    assert reason in record.notes[0]
    assert dump(graph) == before


def test_rows_too_long(fuse):
    graph = trace(training, [64, 32768], [64, 32768], [32768], **BF16)
    assert "does not fit into registers" in fuse(FuseAllReduceNorm, graph).notes[0]


def test_a_weight_cast_after_the_sum(fuse):
    def late(x, residual, weight):
        total = summed(x) + residual
        wide = to(weight, torch.float32)  # stands between the total and its norm
        return rms(total, to(wide, torch.bfloat16))[0]

    graph = trace(late, [ROWS, D], [ROWS, D], [D], **BF16)
    assert fuse(FuseAllReduceNorm, graph).counters["fused"] == 1


@pytest.mark.parametrize("fn", [over_rows, no_norm])
def test_what_is_no_candidate_is_not_mentioned(fuse, fn):
    graph = trace(fn, [ROWS, D], [ROWS, D], [D], **BF16)
    assert fuse(FuseAllReduceNorm, graph).notes == ()


def test_results_equal_on_all_ranks(same_on_all_ranks):
    for fn, shapes in (
        (training, ([16, 32], [16, 32], [32])),
        (with_bias, ([16, 32], [32], [8, 2, 32], [32])),
        (bare_layer, ([16, 32], [32], [32])),
    ):
        same_on_all_ranks(FuseAllReduceNorm, fn, *shapes)
