"""Each rule against the uncut graph: where the parts of a result lie, and that they have its
numbers, bit by bit.
"""

import operator

import pytest
import torch
from cutting import cut_behind
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings

from inductor_passes.split.rules import RULES
from inductor_passes.split.rules.rule import SUM, Cut
from inductor_passes.testing import fake_group, trace

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional
wait = c10d.wait_tensor
X = [4, 6, 8]


def attention(x):
    return aten._scaled_dot_product_flash_attention_for_cpu(x, x + 1, x - 1, 0.0, True)[0]


def attention_unmasked(x):
    return aten._scaled_dot_product_flash_attention_for_cpu(x, x + 1, x - 1)[0]


def backward_of(x, causal):
    q, k, v = x.sin(), x.cos(), x * 0.1
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        x, q, k, v, out, logsumexp, 0.0, causal
    )


def attention_backward(x):
    return backward_of(x, True)


def attention_backward_unmasked(x):
    return backward_of(x, False)


def masked_add(x, into):
    by = x[:, :, 0].long().abs()
    return aten._unsafe_masked_index_put_accumulate.default(into, by[:, :, None] > 1, [by], x)


def chunks(x):
    return aten.cat.default(aten.split.Tensor(x, 2, 0), 1)


def both(launched):
    return [wait(each) for each in launched]


# What is computed on a value cut along a dimension, and how its result lies: operator, function,
# shapes, dim, place.
CASES = [
    (aten.view.default, lambda x: aten.view.default(x, [24, 8]), [X], 0, Cut(0)),
    (aten.view.default, lambda x: aten.view.default(x, [24, 8]), [X], 1, Cut(0, 4)),
    (aten.view.default, lambda x: aten.view.default(x, [4, 1, 6, 8]), [X], 2, Cut(3)),
    (aten._unsafe_view.default, lambda x: aten._unsafe_view.default(x, [4, 48]), [X], 2, Cut(1, 6)),
    (aten.permute.default, lambda x: aten.permute.default(x, [2, 0, -2]), [X], 1, Cut(2)),
    (aten.transpose.int, lambda x: aten.transpose.int(x, -1, 0), [X], 0, Cut(2)),
    (aten.t.default, lambda x: aten.t.default(x), [[4, 6]], 1, Cut(0)),
    (aten.unsqueeze.default, lambda x: aten.unsqueeze.default(x, 0), [X], 1, Cut(2)),
    (aten.unsqueeze.default, lambda x: aten.unsqueeze.default(x, -1), [X], 1, Cut(1)),
    (aten.squeeze.dim, lambda x: aten.squeeze.dim(x, 0), [[1, 4]], 1, Cut(0)),
    (aten.squeeze.dims, lambda x: aten.squeeze.dims(x, [0, 2]), [[1, 4, 1, 6]], 3, Cut(1)),
    (aten.expand.default, lambda x: aten.expand.default(x, [3, 4, 6]), [[4, 1]], 0, Cut(1)),
    (aten.slice.Tensor, lambda x: aten.slice.Tensor(x, 1, 1, 3), [X], 0, Cut(0)),
    (aten.select.int, lambda x: aten.select.int(x, 0, 1), [X], 2, Cut(1)),
    (aten.constant_pad_nd.default, lambda x: aten.constant_pad_nd.default(x, [1, 2]), [X], 0, Cut(0)),
    (aten.slice_scatter.default, lambda x, y: aten.slice_scatter.default(x, y, 1, 2, 4), [X, [4, 2, 8]], 0, Cut(0)),
    (aten.slice_scatter.default, lambda y: aten.slice_scatter.default(torch.zeros(X, dtype=y.dtype), y, 1, 2, 4), [[4, 2, 8]], 2, Cut(2)),
    (aten.select_scatter.default, lambda y: aten.select_scatter.default(torch.zeros(X, dtype=y.dtype), y, 0, 1), [[6, 8]], 0, Cut(1)),
    (aten.split.Tensor, lambda x: aten.split.Tensor(x, 3, 1), [X], 0, (Cut(0), Cut(0))),
    (aten.split_with_sizes.default, lambda x: aten.split_with_sizes.default(x, [2, 4], 1), [X], 0, (Cut(0), Cut(0))),
    (aten.cat.default, lambda x, y: aten.cat.default([x, y], 1), [X, [4, 2, 8]], 0, Cut(0)),
    (aten.cat.default, lambda x, y: aten.cat.default([x, y], 0), [X, X], 0, Cut(0, 2)),
    (aten.mm.default, lambda x, w: aten.mm.default(x, w), [[4, 6], [6, 8]], 0, Cut(0)),
    (aten.mm.default, lambda w, x: aten.mm.default(x, w), [[6, 8], [4, 6]], 1, Cut(1)),
    (aten.mm.default, lambda x, w: aten.mm.default(x, w), [[4, 6], [6, 8]], 1, SUM),
    (aten.mm.default, lambda x: aten.mm.default(aten.t.default(x), x + 1), [[4, 6]], 0, SUM),
    (aten.addmm.default, lambda x, w, b: aten.addmm.default(b, x, w), [[4, 6], [6, 8], [8]], 0, Cut(0)),
    (aten.addmm.default, lambda x, w, b: aten.addmm.default(b, x, w), [[4, 6], [6, 8], [4, 8]], 0, Cut(0)),
    (aten.addmm.default, lambda x, w, b: aten.addmm.default(b, x, w), [[4, 6], [6, 8], [8]], 1, SUM),
    (aten.bmm.default, lambda x, w: aten.bmm.default(x, w), [X, [4, 8, 2]], 0, Cut(0)),
    (aten.bmm.default, lambda x, w: aten.bmm.default(x, w), [X, [4, 8, 2]], 1, Cut(1)),
    (aten.bmm.default, lambda x, w: aten.bmm.default(x, w), [X, [4, 8, 2]], 2, SUM),
    (aten.baddbmm.default, lambda x, w, b: aten.baddbmm.default(b, x, w), [X, [4, 8, 2], [4, 6, 2]], 0, Cut(0)),
    (aten.baddbmm.default, lambda x, w, b: aten.baddbmm.default(b, x, w), [X, [4, 8, 2], [4, 6, 2]], 2, SUM),
    (aten.sum.default, lambda x: aten.sum.default(x), [X], 1, SUM),
    (aten.sum.dim_IntList, lambda x: aten.sum.dim_IntList(x, [0]), [X], 1, Cut(0)),
    (aten.sum.dim_IntList, lambda x: aten.sum.dim_IntList(x, [0], True), [X], 1, Cut(1)),
    (aten.sum.dim_IntList, lambda x: aten.sum.dim_IntList(x, [0, 1]), [X], 1, SUM),
    (aten.mean.dim, lambda x: aten.mean.dim(x, [-1], True), [X], 0, Cut(0)),
    (aten.amax.default, lambda x: aten.amax.default(x, [0]), [X], 2, Cut(1)),
    (aten.amin.default, lambda x: aten.amin.default(x, [0]), [X], 2, Cut(1)),
    (aten.any.dim, lambda x: aten.any.dim(x > 3, 1), [X], 2, Cut(1)),
    (aten.any.dims, lambda x: aten.any.dims(x > 3, [0, 1], True), [X], 2, Cut(2)),
    (aten.any.dims, lambda x: aten.any.dims(x > 3, [0, 1]), [X], 1, SUM),
    (aten.any.default, lambda x: aten.any.default(x > 3), [X], 0, SUM),
    (aten.any.dim, lambda x: aten.any.dim(x > 3, 1), [X], 1, SUM),
    (aten.all.default, lambda x: aten.all.default(x > -4), [X], 0, SUM),
    (aten.all.dim, lambda x: aten.all.dim(x > -4, 1), [X], 1, SUM),
    (aten.all.dims, lambda x: aten.all.dims(x > -4, [0, 1]), [X], 0, SUM),
    (aten.amax.default, lambda x: aten.amax.default(x, [0]), [X], 0, SUM),
    (aten.amin.default, lambda x: aten.amin.default(x, [0, 1]), [X], 1, SUM),
    (aten.mean.dim, lambda x: aten.mean.dim(x, [0], True), [X], 0, SUM),
    (aten.mean.default, lambda x: aten.mean.default(x[:, :4]), [X], 2, SUM),
    (aten.argmax.default, lambda x: aten.argmax.default(x, 1), [X], 0, Cut(0)),
    (aten.argmin.default, lambda x: aten.argmin.default(x, 1), [X], 0, Cut(0)),
    (aten.var.correction, lambda x: aten.var.correction(x, [1], correction=0), [X], 0, Cut(0)),
    (aten.var_mean.correction, lambda x: aten.var_mean.correction(x, [1], correction=0), [X], 0, (Cut(0), Cut(0))),
    (aten.cumsum.default, lambda x: aten.cumsum.default(x, 1), [X], 0, Cut(0)),
    (aten.topk.default, lambda x: aten.topk.default(x, 2), [X], 0, (Cut(0), Cut(0))),
    (aten.sort.default, lambda x: aten.sort.default(x, 1)[0], [X], 0, (Cut(0), Cut(0))),
    (aten._softmax.default, lambda x: aten._softmax.default(x, -1, False), [X], 0, Cut(0)),
    (aten._log_softmax.default, lambda x: aten._log_softmax.default(x, 1, False), [X], 2, Cut(2)),
    (aten._softmax_backward_data.default, lambda x, y: aten._softmax_backward_data.default(x, y, -1, torch.float64), [X, X], 0, Cut(0)),
    (aten._log_softmax_backward_data.default, lambda x, y: aten._log_softmax_backward_data.default(x, y, -1, torch.float64), [X, X], 1, Cut(1)),
    (aten.embedding.default, lambda i, w: aten.embedding.default(w, i.abs().long()), [[4, 6], [9, 3]], 1, Cut(1)),
    (aten.embedding_dense_backward.default, lambda g, i: aten.embedding_dense_backward.default(g, i.abs().long(), 9, -1, False), [X, [4, 6]], 0, SUM),
    (aten.gather.default, lambda x, i: aten.gather.default(x, 1, i.abs().long()), [X, [4, 2, 8]], 0, Cut(0)),
    (aten.scatter.value, lambda i: aten.scatter.value(torch.zeros([4, 9], dtype=i.dtype), 1, i.abs().long(), 2), [[4, 2]], 0, Cut(0)),
    (aten.scatter.src, lambda x, i: aten.scatter.src(x, 1, i.abs().long()[:, :1], x + 1), [[4, 6], [4, 6]], 0, Cut(0)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, attention, [[4, 2, 6, 8]], 0, (Cut(0), Cut(0))),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward, [[4, 2, 6, 8]], 0, (Cut(0),) * 3),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, attention, [[2, 2, 8, 8]], 2, (Cut(2), Cut(2))),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, attention_unmasked, [[2, 2, 8, 8]], 2, (Cut(2), Cut(2))),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward, [[2, 2, 8, 8]], 2, (Cut(2),) * 3),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward_unmasked, [[2, 2, 8, 8]], 2, (Cut(2),) * 3),
    (aten.mul.Tensor, lambda x, y: aten.mul.Tensor(x, y), [X, [6, 1]], 1, Cut(1)),
    (aten.add.Tensor, lambda b, x: aten.add.Tensor(x, b), [[6, 8], X], 0, Cut(1)),
    (aten.where.self, lambda x: aten.where.self(x > 0, x, x * 2), [X], 2, Cut(2)),
    (prims.convert_element_type.default, lambda x: prims.convert_element_type.default(x, torch.float32), [X], 0, Cut(0)),
    (aten.clone.default, lambda x: aten.clone.default(x, memory_format=torch.contiguous_format), [X], 1, Cut(1)),
    (aten.full_like.default, lambda x: aten.full_like.default(x, 2), [X], 0, Cut(0)),
    (c10d.all_reduce_coalesced.default, lambda x: both(c10d.all_reduce_coalesced([x, x * 2], "sum", "0")), [X], 1, (Cut(1), Cut(1))),
    (c10d.all_reduce_coalesced.default, lambda x, y: both(c10d.all_reduce_coalesced([x, y], "sum", "0")), [X, [4, 3]], 2, (Cut(2), Cut(0))),
    (c10d.all_gather_into_tensor_coalesced.default, lambda x: both(c10d.all_gather_into_tensor_coalesced([x, x * 2], 2, "0")), [X], 0, (Cut(0, 2), Cut(0, 2))),
    (c10d.reduce_scatter_tensor_coalesced.default, lambda x, y: both(c10d.reduce_scatter_tensor_coalesced([x, y], "sum", 2, "0")), [X, X], 1, (Cut(1), Cut(0))),
    (c10d.all_reduce.default, lambda x: wait(c10d.all_reduce(x, "sum", "0")), [X], 1, Cut(1)),
    (c10d.wait_tensor.default, lambda x: wait(c10d.all_reduce(x, "max", "0")), [X], 0, Cut(0)),
    (c10d.all_gather_into_tensor.default, lambda x: wait(c10d.all_gather_into_tensor(x, 2, "0")), [X], 0, Cut(0, 2)),
    (c10d.all_gather_into_tensor.default, lambda x: wait(c10d.all_gather_into_tensor(x, 2, "0")), [X], 1, Cut(1)),
    (c10d.reduce_scatter_tensor.default, lambda x: wait(c10d.reduce_scatter_tensor(x, "sum", 2, "0")), [X], 2, Cut(2)),
    (c10d.reduce_scatter_tensor.default, lambda x: wait(c10d.reduce_scatter_tensor(torch.cat([x, x + 1]), "sum", 2, "0")), [X], 0, Cut(0)),
    (c10d.all_to_all_single.default, lambda x: wait(c10d.all_to_all_single(x, [2, 2], [2, 2], "0")), [X], 1, Cut(1)),
    (c10d.all_to_all_single.default, lambda x: wait(c10d.all_to_all_single(torch.cat([x, x + 1]), [4, 4], [4, 4], "0")), [X], 0, Cut(0, 2)),
    (aten.index.Tensor, lambda x: aten.index.Tensor(x, [None, (torch.arange(4) // 2).view(2, 2)]), [X], 0, Cut(0)),
    (aten.index.Tensor, lambda x: aten.index.Tensor(x, [None, (torch.arange(4) // 2).view(2, 2)]), [X], 2, Cut(3)),
    (aten.index.Tensor, lambda x, t: aten.index.Tensor(t, [None, x[0, 0].long().abs()]), [X, [3, 5, 2]], 2, Cut(1)),
    (aten.index_put.default, lambda x: aten.index_put.default(x, [None, torch.arange(4) // 2], x[:, 1:5] + 1, True), [X], 0, Cut(0)),
    (aten.index_put.default, lambda x: aten.index_put.default(x, [None, torch.arange(2) * 3], x[:, 1:3] + 1), [X], 2, Cut(2)),
    (aten.index_put.default, lambda x, t: aten.index_put.default(t, [x[0, 0].long().abs()], x[1, :5].t(), True), [X, [5, 5]], 2, SUM),
    (aten.index_put.default, lambda x: aten.index_put.default(x, [x[:, :, 0] > 0], torch.ones([], dtype=x.dtype)), [X], 1, Cut(1)),
    (aten.index_put.default, lambda x, m: aten.index_put.default(x, [m > 0], torch.ones([1], dtype=x.dtype)), [X, [4, 6]], 2, Cut(2)),
    (aten._unsafe_masked_index_put_accumulate.default, masked_add, [[4, 6, 3], [5, 3]], 0, SUM),
    (aten._unsafe_masked_index_put_accumulate.default, masked_add, [[4, 6, 3], [5, 3]], 1, SUM),
    (aten._unsafe_index_put.default, lambda x, t: aten._unsafe_index_put.default(t, [None, x[0, 0].long().abs()], x[1, :5], True), [X, [5, 5]], 2, SUM),
    (aten.scatter_add.default, lambda x, t: aten.scatter_add.default(t, 1, x[0].long().abs(), x[1]), [X, [6, 5]], 2, SUM),
    (aten.scatter_add.default, lambda x: aten.scatter_add.default(x[0], 1, x[1].long().abs(), x[1]), [X], 1, Cut(0)),
]  # fmt: skip
# Vectors end elsewhere in a part: the last bit of what is not exact may differ.
ROUNDED = ("softmax", "var", "attention", "mean")


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    ("target", "fn", "shapes", "dim", "place"),
    CASES,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)],
)
def test_parts_have_the_numbers(in_parts, target, fn, shapes, dim, place, parts):
    if shapes[0][dim] % parts:
        pytest.skip("no equal parts")
    tolerance = 1e-12 if any(word in str(target) for word in ROUNDED) else 0.0
    steps, region = in_parts(fn, *shapes, parts=parts, dim=dim, tolerance=tolerance)
    assert (target, place) in steps
    assert not region.ended


def test_what_parts_add_needs_no_decomposition():
    """A graph is cut when Inductor has decomposed it: what it would still decompose it refuses
    then.
    """
    made = set()
    with fake_group(2):
        for _, fn, shapes, dim, _ in CASES:
            if shapes[0][dim] % 2:
                continue
            graph = trace(fn, *shapes, dtype=torch.float64)
            graph.eliminate_dead_code()
            was = {node.target for node in graph.nodes}
            cut, _, _ = cut_behind(graph, 2, dim)
            made |= {node.target for node in cut.nodes if node.op == "call_function"} - was
    assert aten.cat.default in made and len(made) > 10
    assert [t for t in made if t in decompositions and t not in lowerings] == []


def test_every_rule_has_a_case():
    # Tracing makes a view of a reshape; getitem stands behind every operator of several results.
    assert RULES[aten.reshape.default] is RULES[aten.view.default]
    traced = {target for target, *_ in CASES}
    assert traced >= set(RULES) - {operator.getitem, aten.reshape.default}


# What ends a region, and what is said of it.
ENDS = [
    (lambda x: aten.view.default(x, [6, 32]), 1, "no dimension of [6, 32] holds the parts"),
    (lambda x: aten.slice.Tensor(x, 0, 0, 2), 0, "takes a piece along the dimension of the parts"),
    (lambda x: aten.constant_pad_nd.default(x, [1, 1]), 2, "pads the dimension of the parts"),
    (lambda x: aten.slice_scatter.default(x, x[:2], 0, 0, 2), 0, "along the dimension of the parts"),
    (lambda x: aten.split.Tensor(x, 1, 0), 0, "its pieces are not those"),
    (lambda x: aten.cat.default([x, x[:, :2]], 1), 1, "joins pieces of unlike sizes"),
    (lambda x: x[:, :4] + aten.permute.default(x[:, :4], [1, 0, 2]), 0, "its inputs lie in unlike parts"),
    (lambda x: aten.argmax.default(x, 0), 0, "reduces over the parts and is no sum"),
    (lambda x: aten.var.correction(x, [0], correction=0), 0, "reduces over the parts and is no sum"),
    (lambda x: aten.index_put.default(x, [x > -9], x.view(-1)), 0, "which of its values it puts where"),
    (lambda x: aten.cumsum.default(x, 0), 0, "mixes what the parts hold"),
    (lambda x: aten._softmax.default(x, -1, False), 2, "mixes what the parts hold"),
    (lambda x: aten.embedding.default(x[0], torch.zeros(3, dtype=torch.long)), 2, "table lies in parts"),
    (lambda x: aten.bernoulli.default(x.abs() * 0), 0, "draws random numbers"),
    (lambda x: aten.addmm.default(x[0, :, 0], x[0], x[0].t(), beta=2), 2, "its sum is scaled"),
    (lambda x: aten.addmm.default(y := x[0, :, :6], x[1, :, :6], y), 1, "is an operand and the bias"),
    (lambda x: aten.index.Tensor(x, [torch.arange(2)]), 0, "mixes what the parts hold"),
    (lambda x: aten.index.Tensor(x, [torch.arange(2), torch.arange(2)]), 2, "looks up by several"),
    (lambda x: aten.index_put.default(x[0, 0], [x[0, 1].long().abs()], x[0, 2]), 2, "mixes what the parts hold"),
    (lambda x: aten.index_put.default(torch.zeros(5).double(), [x[0, 1].long().abs()], x[0, 2]), 2, "a later part may put"),
    (lambda x: aten.flip.default(x, [1]), 0, "it has no rule"),
    (lambda x: aten.gather.default(x, 0, torch.zeros(1, 3, 8, dtype=torch.long)), 1, "it picks fewer than there are"),
    (lambda x: wait(c10d.reduce_scatter_tensor(x, "sum", 2, "0")), 0, "shares of all ranks"),
    (lambda x: wait(c10d.all_to_all_single(x, [2, 2], [2, 2], "0")), 0, "shares are not equal ones"),
    (lambda x: wait(c10d.broadcast(x, 0, "0")), 0, "it has no rule"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "dim", "reason"), ENDS)
def test_a_region_ends(in_parts, fn, dim, reason):
    _, region = in_parts(fn, [4, 6, 8], dim=dim)
    assert any(reason in said for said in region.ended.values())


def test_parts_that_are_not_equal_end_a_region(in_parts):
    _, region = in_parts(lambda x: aten.view.default(x, [3, 4]) * 2, [12], dim=0)
    assert "no dimension" in next(iter(region.ended.values()))


def test_a_part_of_a_part_is_read_in_slices(in_parts):
    """A value in two blocks: gathered, cut in three there, and what stands beside it is read
    alike.
    """

    def program(x, y):
        return wait(c10d.all_gather_into_tensor(x, 2, "0")) * y

    steps, _ = in_parts(program, [6, 5], [12, 5], parts=3)
    assert (aten.mul.Tensor, Cut(0, 2)) in steps
