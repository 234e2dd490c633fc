import pytest
import torch
from expecttest import TestCase

from inductor_passes.fused import FuseAllGatherMatmul
from inductor_passes.fused.kernels.availability import why_not
from inductor_passes.testing import FixedCost, dump, trace

c10d, prims = torch.ops._c10d_functional, torch.ops.prims
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, "0"))


def qkv(x, q, k, bias):
    rows = gathered(x)
    return torch.addmm(bias, rows, q), torch.addmm(bias, rows, k), rows


def sequence(x, w1, w2):  # [batch 1, sequence, hidden], gathered along the sequence
    whole = torch.cat(gathered(x).split(1), 1)
    rows = whole.view(-1, whole.shape[-1])
    return rows @ w1.t(), rows @ w2.t()


def one_number_for_all(x, w, bias):
    return torch.addmm(bias, gathered(x), w)


def cast_first(x, w):
    return cast(gathered(x)) @ cast(w)


def cast(x):
    return prims.convert_element_type.default(x, torch.bfloat16)


def weight_gathered(x, w):
    return x @ gathered(w)


def batch_of_two(x, w):
    whole = torch.cat(gathered(x).split(2), 1)
    return whole.view(-1, whole.shape[-1]) @ w


def hidden(x, w, y):
    launch = c10d.all_gather_into_tensor(x, 8, "0")
    for _ in range(4):
        y = y @ y
    return c10d.wait_tensor(launch) @ w, y


def two_types(x, w):
    return gathered(x).to(torch.float64) @ w.to(torch.float64)


def no_product(x):
    return gathered(x) + 1


@pytest.fixture
def expect(request):
    return TestCase().assertExpectedInline


def test_several_products_a_bias_and_another_reader(fuse, expect):
    graph = trace(qkv, [1024, 8192], [8192, 1280], [8192, 1280], [1280], **BF16)
    record = fuse(FuseAllGatherMatmul, graph)
    expect(
        "\n".join(record.notes), """fused all_gather %all_gather_into_tensor: 788.0 -> 660.7 us"""
    )
    expect(
        dump(graph),
        """\
x_1: [1024, 8192]
q_1: [8192, 1280]
k_1: [8192, 1280]
bias_1: [1280]
all_gather_matmul_default: ([8192, 1280], [8192, 1280], [8192, 8192]) = all_gather_matmul(x_1, [q_1, k_1], [bias_1, bias_1], none, True, 0, 8)
getitem: [8192, 1280] = getitem(all_gather_matmul_default, 0)
getitem_1: [8192, 1280] = getitem(all_gather_matmul_default, 1)
getitem_2: [8192, 8192] = getitem(all_gather_matmul_default, 2)
return (getitem, getitem_1, getitem_2)""",
    )
    assert not fuse(FuseAllGatherMatmul, graph).changed


def test_views_and_transposed_weights(fuse, expect):
    graph = trace(sequence, [1, 1024, 8192], [1280, 8192], [1280, 8192], **BF16)
    fuse(FuseAllGatherMatmul, graph)
    expect(
        dump(graph),
        """\
x_1: [1, 1024, 8192]
w1_1: [1280, 8192]
w2_1: [1280, 8192]
t: [8192, 1280] = t(w1_1)
t_1: [8192, 1280] = t(w2_1)
reshape_default: [1024, 8192] = reshape(x_1, [1024, 8192])
all_gather_matmul_default: ([8192, 1280], [8192, 1280]) = all_gather_matmul(reshape_default, [t, t_1], [], none, False, 0, 8)
getitem_8: [8192, 1280] = getitem(all_gather_matmul_default, 0)
getitem_9: [8192, 1280] = getitem(all_gather_matmul_default, 1)
return (getitem_8, getitem_9)""",
    )


def test_a_cast_moves_to_the_shard(fuse, expect):
    graph = trace(cast_first, [1024, 8192], [8192, 1280], device="cuda")
    fuse(FuseAllGatherMatmul, graph)
    expect(
        dump(graph),
        """\
x_1: [1024, 8192]
w_1: [8192, 1280]
convert_element_type_1: [8192, 1280] = convert_element_type(w_1, torch.bfloat16)
convert_element_type_default: [1024, 8192] = convert_element_type(x_1, torch.bfloat16)
all_gather_matmul_default: ([8192, 1280]) = all_gather_matmul(convert_element_type_default, [convert_element_type_1], [], none, False, 0, 8)
getitem: [8192, 1280] = getitem(all_gather_matmul_default, 0)
return getitem""",
    )


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (weight_gathered, ([1024, 8192], [1024, 1280]), "not the left operand"),
        (one_number_for_all, ([1024, 8192], [8192, 1280], [1]), "that the kernel makes"),
        (hidden, ([1024, 8192], [8192, 1280], [8192, 8192]), "less than 5% gained"),
        (qkv, ([1024, 8192], [8192, 65536], [8192, 65536], [65536]), "less than 5% gained"),
    ],
)
def test_what_is_declined_is_left_alone(fuse, fn, shapes, reason):
    graph = trace(fn, *shapes, **BF16)
    before = dump(graph)
    record = fuse(FuseAllGatherMatmul, graph)
    assert record.counters == {"fused": 0, "declined": 1}
    assert record.notes[0].startswith("declined all_gather %all_gather_into_tensor")
    assert reason in record.notes[0]
    assert dump(graph) == before


@pytest.mark.parametrize(
    ("fn", "shapes"), [(no_product, ([64, 64],)), (batch_of_two, ([2, 64, 64], [64, 64]))]
)
def test_what_is_no_candidate_is_not_mentioned(fuse, fn, shapes):
    graph = trace(fn, *shapes, **BF16)
    before = dump(graph)
    assert fuse(FuseAllGatherMatmul, graph).notes == ()
    assert dump(graph) == before


def test_where_no_kernel_can_run(fuse, cost):
    shapes = ([1024, 8192], [8192, 1280], [8192, 1280], [1280])

    def notes(obstacle="", cost=cost, **options):
        graph = trace(qkv, *shapes, **{**BF16, **options})
        record = fuse(FuseAllGatherMatmul, graph, obstacle, cost)
        assert not record.changed
        return record.notes[0]

    assert "there is no CUDA device" in notes("there is no CUDA device")
    assert "tensors are on cpu" in notes(why_not("0", "cpu"), device="cpu")
    assert "not torch.float64" in notes(dtype=torch.float64)
    assert "no topology" in notes(cost=FixedCost())
    assert "shapes are dynamic" in notes(device="cpu", dynamic=True)


def test_results_equal_on_all_ranks(same_on_all_ranks):
    same_on_all_ranks(FuseAllGatherMatmul, qkv, [4, 64], [64, 16], [64, 16], [16])
    same_on_all_ranks(FuseAllGatherMatmul, sequence, [1, 4, 64], [16, 64], [16, 64])
