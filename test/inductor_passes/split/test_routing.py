"""Tokens that are sorted, counted, exchanged and put back in parts: each rule against the uncut
graph, bit by bit.
"""

from types import SimpleNamespace

import pytest
import torch
from cutting import RANKS, cut_behind
from expecttest import assert_expected_inline

from inductor_passes.graph.collectives import launches
from inductor_passes.split.region import Positions, spread
from inductor_passes.split.rules import counting, routed, routing
from inductor_passes.split.rules.rows import Addends, Condition, Routed
from inductor_passes.split.rules.rule import SUM, Cut
from inductor_passes.testing import dump, fake_group, trace

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional
wait = c10d.wait_tensor
N, WIDTH, EXPERTS = 8, 6, 4
EVEN = [EXPERTS // RANKS] * RANKS


def exchanged(x, gets, sends):
    return wait(c10d.all_to_all_single(x.contiguous(), gets, sends, "0"))


def sorted_tokens(x):
    """Keys of tokens [N], and where the sorted ones come from."""
    keys = x[:, 0].long() % EXPERTS
    return keys, aten.sort.stable(keys, stable=True)[1]


def one_hot(keys):
    return (keys[:, None] == torch.arange(EXPERTS)).long().sum(0)


def on_the_way(x, counted=one_hot):
    """Tokens that came to this rank, with all that was counted on the way."""
    keys, order = sorted_tokens(x)
    here = counted(keys)
    there = wait(c10d.all_to_all_single(here, EVEN, EVEN, "0"))
    sends, gets = (
        [aten.select.int(c.view(RANKS, -1).sum(1), 0, i).item() for i in range(RANKS)]
        for c in (here, there)
    )
    for size in (*sends, *gets):
        torch._check(size >= 0)
    rows = torch.sym_sum(gets)
    torch._check(sends[0] + sends[1] == N)
    came = exchanged(x[order], gets, sends)
    return SimpleNamespace(
        keys=keys,
        order=order,
        here=here,
        there=there,
        sends=sends,
        gets=gets,
        rows=rows,
        came=came,
        x=x,
    )


def back(t, done):
    """Tokens where they were."""
    came = exchanged(done, t.sends, t.gets)
    return aten.index_put.default(torch.zeros(N, WIDTH).double(), [t.order], came)


def by_rank(t):
    return aten.repeat_interleave.Tensor(t.there, output_size=t.rows)


def put_again(t, put):
    """Sorted again by who sent them, and put back by ``put``."""
    again = aten.sort.default(by_rank(t))[1]
    return put(torch.zeros_like(t.came), again, aten.index.Tensor(t.came, [again]))


LOCAL = EXPERTS // RANKS


def by_expert(t, work, counted=None):
    """Sorted again by expert of this rank, with how many there are of each, and put back."""
    names = torch.arange(EXPERTS).view(RANKS, -1)[0].repeat(RANKS)
    mine = names[by_rank(t)]
    counts = t.there.view(RANKS, -1).sum(0) if counted is None else counted(mine)
    again = aten.sort.stable(mine, stable=True)[1]
    done = work(aten.index.Tensor(t.came, [again]), counts)
    return aten.index_put.default(torch.zeros_like(t.came), [again], done)


def sizes_of(rows, counts):
    """Sizes of the two runs."""
    first, last = (aten.select.int(counts, 0, i).item() for i in range(LOCAL))
    for size in (first, last):
        torch._check(size >= 0)
    torch._check(first + last == rows.shape[0])
    return [first, last]


def in_pieces(rows, counts):
    first, last = aten.split_with_sizes.default(rows, sizes_of(rows, counts), 0)
    return aten.cat.default([first * 2, last * 3 + 1])


def in_slices(rows, counts):
    end = aten.select.int(counts.cumsum(0), 0, 0).item()
    torch._check(end >= 0)
    torch._check(end <= rows.shape[0])
    first, last = aten.slice.Tensor(rows, 0, 0, end), aten.slice.Tensor(rows, 0, end, 2**63 - 1)
    return aten.cat.default([first * 2, last * 3])


def in_groups(rows, counts):
    """A product of each run with weights of its own, as wide as CPU kernels take."""
    weights = (torch.arange(LOCAL * 64).view(LOCAL, 8, 8) % 3).to(torch.bfloat16)
    few = rows[:, :1].to(torch.bfloat16).expand(-1, 8).contiguous()
    done = aten._grouped_mm.default(few, weights, counts.cumsum(0).int())
    return done.double()[:, :1] + rows


def of_two(keys):
    return (keys[:, None] == torch.arange(LOCAL)).long().sum(0)


def wide(index):
    return index[:, None].expand(-1, WIDTH)


# What is computed on the tokens that came: operator, and a function that leaves [rows, WIDTH].
ROWS = [
    (aten.view.default, lambda t: aten.view.default(t.came, [t.rows, 2, 3]).sum(1)[:, :1] + t.came),
    (aten.view.default, lambda t: aten.view.default(t.came[:, None], [t.rows, WIDTH])),
    (aten._unsafe_view.default, lambda t: aten._unsafe_view.default(t.came, [t.rows, WIDTH])),
    (aten.permute.default, lambda t: aten.permute.default(t.came, [1, 0]).t()),
    (aten.transpose.int, lambda t: aten.transpose.int(t.came, 0, 1).t()),
    (aten.t.default, lambda t: aten.t.default(t.came).t() + 1),
    (aten.unsqueeze.default, lambda t: aten.unsqueeze.default(t.came, 0)[0]),
    (aten.squeeze.dim, lambda t: aten.squeeze.dim(t.came[None], 0)),
    (aten.squeeze.dims, lambda t: aten.squeeze.dims(t.came[None], [0])),
    (aten.expand.default, lambda t: aten.expand.default(t.came[:, :1], [t.rows, WIDTH])),
    (aten.full.default, lambda t: t.came + aten.full.default([t.rows, 1], 2)),
    (aten.zeros.default, lambda t: t.came + aten.zeros.default([t.rows, WIDTH])),
    (aten.ones.default, lambda t: t.came * aten.ones.default([t.rows])[:, None]),
    (aten.new_zeros.default, lambda t: t.came + aten.new_zeros.default(t.came, [t.rows, 1])),
    (aten.new_ones.default, lambda t: t.came + aten.new_ones.default(t.came, [WIDTH])),
    (aten.new_full.default, lambda t: t.came * aten.new_full.default(t.came, [1], 2)),
    (aten.zeros_like.default, lambda t: t.came + aten.zeros_like.default(t.came)),
    (aten.slice.Tensor, lambda t: aten.slice.Tensor(t.came, 0, 0, 2**63 - 1) * 2),
    (aten.slice.Tensor, lambda t: aten.slice.Tensor(t.came, 1, 2, 3) + t.came),
    (aten.select.int, lambda t: aten.select.int(t.came, 1, 2)[:, None] + t.came),
    (aten.topk.default, lambda t: aten.topk.default(t.came, 2)[0][:, :1] + t.came),
    (aten.cumsum.default, lambda t: aten.cumsum.default(t.came, 1)),
    (aten._softmax.default, lambda t: aten._softmax.default(t.came * 0, 1, False)),
    (aten._log_softmax.default, lambda t: aten._log_softmax.default(t.came[:, :1], 1, False) + t.came),
    (aten.split.Tensor, lambda t: aten.split.Tensor(t.came, 3, 1)[1][:, :1] + t.came),
    (aten.split_with_sizes.default, lambda t: aten.split_with_sizes.default(t.came, [3, 3], 1)[0][:, :1] + t.came),
    (aten.cat.default, lambda t: aten.cat.default([t.came[:, 3:], t.came[:, :3]], 1)),
    (aten.amax.default, lambda t: aten.amax.default(t.came, [1], True) + t.came),
    (aten.mean.dim, lambda t: aten.mean.dim(t.came * 6, [1], True) + t.came),
    (aten.any.dim, lambda t: aten.any.dim(t.came > 1, 1)[:, None] * t.came),
    (aten.argmax.default, lambda t: aten.argmax.default(t.came, 1)[:, None] + t.came),
    (aten.mm.default, lambda t: aten.mm.default(t.came, torch.ones(WIDTH, WIDTH).double())),
    (aten.mm.default, lambda t: aten.mm.default(torch.ones(WIDTH, WIDTH).double(), t.came.t()).t()),
    (aten.addmm.default, lambda t: aten.addmm.default(torch.ones(WIDTH).double(), t.came, torch.ones(WIDTH, WIDTH).double())),
    (aten.repeat_interleave.Tensor, lambda t: t.came + by_rank(t)[:, None]),
    (aten.sym_size.int, lambda t: t.came + torch.ones(t.came.shape[0])[:, None]),
    (aten.index.Tensor, lambda t: torch.arange(EXPERTS)[by_rank(t)][:, None] + t.came),
    (aten.index_select.default, lambda t: aten.index_select.default(torch.arange(EXPERTS), 0, by_rank(t))[:, None] + t.came),
    (aten.index.Tensor, lambda t: aten.index.Tensor(t.came, [None, torch.arange(WIDTH) // 2])),
    (aten.embedding.default, lambda t: aten.embedding.default(torch.eye(EXPERTS, WIDTH).double(), by_rank(t)) + t.came),
    (aten.gather.default, lambda t: aten.gather.default(t.came, 1, t.came.long() % WIDTH)),
    (aten.index_put.default, lambda t: put_again(t, lambda z, by, x: aten.index_put.default(z, [by], x))),
    (aten.index_copy.default, lambda t: put_again(t, lambda z, by, x: aten.index_copy.default(z, 0, by, x))),
    (aten.index_add.default, lambda t: put_again(t, lambda z, by, x: aten.index_add.default(z, 0, by, x))),
    (aten.scatter_add.default, lambda t: put_again(t, lambda z, by, x: aten.scatter_add.default(z, 0, wide(by), x))),
    (aten.scatter.src, lambda t: put_again(t, lambda z, by, x: aten.scatter.src(z, 0, wide(by), x))),
    (aten.sort.default, lambda t: put_again(t, lambda z, by, x: x[aten.sort.stable(by, stable=True)[1]])),
    (aten.gather.default, lambda t: put_again(t, lambda z, by, x: aten.gather.default(x, 0, wide(by.argsort())))),
    (aten.split_with_sizes.default, lambda t: by_expert(t, in_pieces)),
    (aten.cat.default, lambda t: by_expert(t, in_pieces, of_two)),
    (aten.slice.Tensor, lambda t: by_expert(t, in_slices)),
    (aten._grouped_mm.default, lambda t: by_expert(t, in_groups)),
    (aten._grouped_mm.default, lambda t: by_expert(t, in_groups, of_two)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "body", "parts"),
    [(*case, 2 if i % 2 else 4) for i, case in enumerate(ROWS)],
    ids=[f"{i}-{case[0]}" for i, case in enumerate(ROWS)],
)
def test_rows_by_token_have_the_numbers(in_parts, target, body, parts):
    def program(x):
        t = on_the_way(x)
        return back(t, body(t))

    steps, region = in_parts(program, [N, WIDTH], parts=parts)
    assert len(region.launches) == 3 and not region.ended, region.ended
    lies = [out for made, out in steps if made is target]
    assert any(
        isinstance(out, Routed) or out == SUM or isinstance(out, (tuple, Addends)) for out in lies
    )


def scattered(keys):
    ones = torch.ones(N, dtype=torch.long)
    return aten.scatter_add.default(torch.zeros(EXPERTS, dtype=torch.long), 0, keys, ones)


def put_ones(keys):
    one = torch.ones([], dtype=torch.long)
    return aten.index_put.default(torch.zeros(EXPERTS, dtype=torch.long), [keys], one, True)


def added_ones(keys):
    ones = torch.ones_like(keys)
    return aten.index_add.default(torch.zeros(EXPERTS, dtype=torch.long), 0, keys, ones)


COUNTS = [
    (aten.sum.dim_IntList, one_hot),
    (aten.histc.default, lambda keys: aten.histc.default(keys.double(), EXPERTS, 0, EXPERTS).long()),
    (aten.scatter_add.default, scattered),
    (aten.index_put.default, put_ones),
    (aten.index_add.default, added_ones),
]  # fmt: skip


@pytest.mark.parametrize(("target", "counted"), COUNTS)
def test_what_counts_tokens_counts_those_of_a_part(in_parts, target, counted):
    def program(x):
        t = on_the_way(x, counted)
        return back(t, t.came * 2), t.here

    steps, region = in_parts(program, [N, WIDTH])
    assert len(region.launches) == 3
    (lies,) = [
        out for made, out in steps if made is target and isinstance(out, Addends) and out.counts.groups == EXPERTS
    ]  # fmt: skip
    assert lies.counts.at is None and lies.joins


def test_every_rule_has_a_case():
    used = {target for target, _ in (*ROWS, *COUNTS)}
    assert set(counting.COUNTING) <= used
    several = {
        aten.reshape.default,  # traced as a view
        aten.argsort.default,  # as a sort
        aten.argsort.stable,
        aten._unsafe_index_put.default,  # as index_put
        aten.all.default,  # with the other reductions
        aten.sort.stable,  # of all programs here
        wait.default,
        c10d.all_to_all_single.default,
        *(aten.baddbmm.default, aten.bmm.default),  # are refused
        *(t for t in routed.RULES if routed.RULES[t] is routed.reduce_rows),
    }
    assert set(routing._ROW_RULES) - several <= used


def test_sums_over_rows_are_those_of_the_parts(in_parts):
    def program(x, w):
        t = on_the_way(x)
        grad = aten.mm.default(t.came.t(), t.came * 2)
        few = aten.any.dim(t.came > 3, 0), aten.all.default(t.came < 9)
        total = aten.index_put.default(
            torch.zeros(EXPERTS, WIDTH).double(), [by_rank(t)], t.came, True
        )
        return back(t, t.came), grad, t.came.sum(0), few, total

    steps, region = in_parts(program, [N, WIDTH], [WIDTH])
    assert [target for target, out in steps if out == SUM] == [
        *(aten.mm.default, aten.any.dim, aten.all.default, aten.index_put.default),
        aten.sum.dim_IntList,
    ] and not region.ended


def test_counts_of_all_parts_are_read_beside_those_of_each(in_parts):
    """An auxiliary loss wants the sum; a size that the whole has is a symbol that it had."""

    def program(x):
        t = on_the_way(x)
        share = t.here.double() / N
        return back(t, t.came), (share * x.mean(0)[:EXPERTS]).sum(), torch.ones(t.gets[0]).sum()

    _, region = in_parts(program, [N, WIDTH], tolerance=1e-12)
    assert len(region.launches) == 3
    reasons = set(region.ended.values())
    assert "it has no rule for rows in a part's own order" not in reasons


def test_inverse_of_an_order_brings_tokens_back(in_parts):
    def program(x):
        _, order = sorted_tokens(x)
        y = x.repeat_interleave(1, 0)[order] * 2
        inverse = aten.sort.default(order)[1]
        return y[inverse] + 1

    steps, region = in_parts(program, [N, WIDTH])
    assert (aten.index.Tensor, Cut(0)) in steps and not region.ended


def test_several_rows_of_a_token_are_added_to_it(in_parts):
    def program(x):
        keys = x[:, :2].long().reshape(-1) % EXPERTS
        order = keys.argsort(stable=True)
        token, which = order // 2, order % 2
        rows = x[token] * (which + 1)[:, None]
        return aten.index_put.default(torch.zeros(N, WIDTH).double(), [token], rows, True)

    steps, region = in_parts(program, [N, WIDTH], parts=4)
    assert (aten.index_put.default, Cut(0)) in steps and not region.ended


def capacity(x):
    """Places within each expert, counted over all tokens: those beyond two are dropped."""
    keys, _order = sorted_tokens(x)
    place = (keys[:, None] == torch.arange(EXPERTS)).long().cumsum(0)
    return x * (place.amax(1) <= 2)[:, None]


def returned(x):
    t = on_the_way(x)
    return t.came


def unlike(x):
    t = on_the_way(x)
    other = (x[:, 1].long() % EXPERTS).argsort(stable=True)
    return back(t, exchanged(x[other], t.gets, t.sends))


def mixed(x):
    t = on_the_way(x)
    return back(t, t.came.cumsum(0))


def descending(x):
    keys = x[:, 0].long() % EXPERTS
    t = on_the_way(x)
    order = keys.sort(descending=True)[1]
    return back(t, exchanged(x[order], t.gets, t.sends))


def with_places(x):
    t = on_the_way(x)
    return back(t, exchanged(x[t.order] + t.order[:, None], t.gets, t.sends))


def mean(x):
    t = on_the_way(x)
    return back(t, t.came - t.came.mean(0))


# Programs whose tokens cannot be exchanged in parts: what is at fault, and the operator that says
# so.
ENDS = [
    (capacity, "cumsum", "mixes what the parts hold"),
    (returned, "sort", "it is returned"),
    (unlike, "sort", "rows in unlike orders"),
    (mixed, "sort", "it mixes rows"),
    (descending, "sort", "rows in unlike orders"),
    (with_places, "sort", "places of rows"),
    (mean, "sort", "reduces over rows"),
]


@pytest.mark.parametrize(("program", "operator", "reason"), ENDS)
def test_what_needs_all_tokens_ends_the_region(in_parts, program, operator, reason):
    _, region = in_parts(program, [N, WIDTH])
    assert not [n for n, step in region.steps.items() if isinstance(step.out, Routed)]
    said = [why for node, why in region.ended.items() if operator in str(node.target)]
    assert any(reason in why for why in said), region.ended
    assert not region.launches


def test_unsplit_token_exchange_leaves_its_layer_unsplit():
    with fake_group(RANKS):
        graph = trace(lambda x: back(t := on_the_way(x), t.came), [N, WIDTH])
        seed = graph.find_nodes(op="placeholder")[0]
        some = launches(graph)[:2]
        region = spread(Positions(graph), seed, Cut(0), 2, some)
        assert not region.launches


def test_sizes_of_a_part_are_symbols_of_its_own(in_parts):
    with fake_group(RANKS):
        graph = trace(lambda x: back(t := on_the_way(x), t.came), [N, WIDTH])
        cut, region, _ = cut_behind(graph, 2)
        sizes = cut.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
        bound = [set(node.meta["unbacked_bindings"]) for node in sizes]
        assert len(sizes) == 8 and len(set.union(*bound)) == 8
        checks = cut.find_nodes(op="call_function", target=aten._assert_scalar.default)
        assert [check.args[1] for check in checks] == [
            f"A part of %{node.name} has not 4 rows."
            for node in [list(region.launches)[-1]]
            for _ in range(2)
        ]


def test_a_check_of_sizes_is_one_of_each_part(in_parts):
    def program(x):
        t = on_the_way(x)
        aten._assert_scalar.default(t.sends[0] >= 0, "none below zero")
        aten._assert_scalar.default(t.sends[0] <= N, "no more than there are")
        aten._assert_scalar.default(torch.sym_sum(t.sends) == N, "all of them")
        aten.sym_constrain_range_for_size.default(t.gets[0], min=0)
        return back(t, t.came)

    steps, region = in_parts(program, [N, WIDTH], parts=4)
    assert sum(isinstance(out, Condition) for _, out in steps) >= 4 and not region.ended


def test_golden_sorted_and_put_back():
    def program(x):
        _keys, order = sorted_tokens(x)
        return aten.index_put.default(torch.zeros(N, WIDTH), [order], x[order] * 2)

    with fake_group(RANKS):
        graph = trace(program, [N, WIDTH])
        cut, _, _ = cut_behind(graph, 2)
        assert_expected_inline(
            dump(cut),
            """\
x_1: [8, 6]
slice_tensor: [4, 6] = slice(x_1, 0, 0, 4)
slice_tensor_1: [4, 6] = slice(x_1, 0, 4, 8)
select_int: [4] = select(slice_tensor, 1, 0)
select_int_1: [4] = select(slice_tensor_1, 1, 0)
_to_copy_default: [4] = _to_copy(select_int, dtype=torch.int64)
_to_copy_default_1: [4] = _to_copy(select_int_1, dtype=torch.int64)
remainder_scalar: [4] = remainder(_to_copy_default, 4)
remainder_scalar_1: [4] = remainder(_to_copy_default_1, 4)
sort_stable: ([4], [4]) = sort(remainder_scalar, stable=True)
sort_stable_1: ([4], [4]) = sort(remainder_scalar_1, stable=True)
getitem_2: [4] = getitem(sort_stable, 0)
getitem_3: [4] = getitem(sort_stable_1, 0)
getitem_4: [4] = getitem(sort_stable, 1)
getitem_5: [4] = getitem(sort_stable_1, 1)
zeros: [8, 6] = zeros([8, 6], device=cpu, pin_memory=False)
index_tensor: [4, 6] = index(slice_tensor, [getitem_4])
index_tensor_1: [4, 6] = index(slice_tensor_1, [getitem_5])
mul_tensor: [4, 6] = mul(index_tensor, 2)
mul_tensor_1: [4, 6] = mul(index_tensor_1, 2)
slice_tensor_2: [4, 6] = slice(zeros, 0, 0, 4)
slice_tensor_3: [4, 6] = slice(zeros, 0, 4, 8)
index_put_default: [4, 6] = index_put(slice_tensor_2, [getitem_4], mul_tensor)
index_put_default_1: [4, 6] = index_put(slice_tensor_3, [getitem_5], mul_tensor_1)
cat_default: [8, 6] = cat([index_put_default, index_put_default_1], 0)
return cat_default""",
        )


def test_golden_launches_by_token():
    with fake_group(RANKS):
        graph = trace(lambda x: back(t := on_the_way(x), t.came), [N, WIDTH])
        cut, _, _ = cut_behind(graph, 2)
        lines = [line for line in dump(cut).splitlines() if "all_to_all" in line]
        assert_expected_inline(
            "\n".join(lines),
            """\
all_to_all_single_default: [4] = all_to_all_single(sum_dim_int_list, [2, 2], [2, 2], 0)
all_to_all_single_default_1: [4] = all_to_all_single(sum_dim_int_list_1, [2, 2], [2, 2], 0)
wait_tensor_default: [4] = wait_tensor(all_to_all_single_default)
wait_tensor_default_1: [4] = wait_tensor(all_to_all_single_default_1)
all_to_all_single_default_2: [u10 + u8, 6] = all_to_all_single(index_tensor, [_local_scalar_dense_default_4, _local_scalar_dense_default_6], [_local_scalar_dense_default, _local_scalar_dense_default_2], 0)
all_to_all_single_default_3: [u11 + u9, 6] = all_to_all_single(index_tensor_1, [_local_scalar_dense_default_5, _local_scalar_dense_default_7], [_local_scalar_dense_default_1, _local_scalar_dense_default_3], 0)
wait_tensor_default_2: [u10 + u8, 6] = wait_tensor(all_to_all_single_default_2)
wait_tensor_default_3: [u11 + u9, 6] = wait_tensor(all_to_all_single_default_3)
all_to_all_single_default_4: [u4 + u6, 6] = all_to_all_single(wait_tensor_default_2, [_local_scalar_dense_default, _local_scalar_dense_default_2], [_local_scalar_dense_default_4, _local_scalar_dense_default_6], 0)
sym_size_int: u4 + u6 = sym_size(all_to_all_single_default_4, 0)
_assert_scalar_default = _assert_scalar(eq_1, A part of %all_to_all_single_2 has not 4 rows.)
all_to_all_single_default_5: [u5 + u7, 6] = all_to_all_single(wait_tensor_default_3, [_local_scalar_dense_default_1, _local_scalar_dense_default_3], [_local_scalar_dense_default_5, _local_scalar_dense_default_7], 0)
sym_size_int_1: u5 + u7 = sym_size(all_to_all_single_default_5, 0)
_assert_scalar_default_1 = _assert_scalar(eq_2, A part of %all_to_all_single_2 has not 4 rows.)
wait_tensor_default_4: [u4 + u6, 6] = wait_tensor(all_to_all_single_default_4)
wait_tensor_default_5: [u5 + u7, 6] = wait_tensor(all_to_all_single_default_5)""",
        )
