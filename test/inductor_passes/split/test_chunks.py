"""Collective products in chunks: what comes out, that numbers stay, what is left whole, and ranks that follow a plan."""

import copy

import pytest
import torch
from cutting import same, whole_numbers
from expecttest import assert_expected_inline

from inductor_passes.agree.graph import Frame, number_launches, plan_of
from inductor_passes.agree.plan import LaunchPlan
from inductor_passes.errors import CannotFollowError, InvariantError
from inductor_passes.fuse.prediction import Prediction
from inductor_passes.graph.collectives import launches
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.split.chunks import ChunkProducts
from inductor_passes.split.cut import Cutter
from inductor_passes.split.products import collective_products
from inductor_passes.testing import FixedCost, dump, trace

c10d = torch.ops._c10d_functional
RANKS = 2


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))


def scattered(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", RANKS, "0"))


def reduced(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def gather_then_product(x, w):
    return gathered(x) @ w


def product_then_scatter(x, w):
    return scattered(x @ w)


def product_then_reduce(x, w):
    return reduced((x @ w).to(torch.float64))


def weight_then_product(x, w):
    return x @ gathered(w).t()


def batched(x, w):
    return reduced(torch.bmm(x.reshape(2, 4, 8), w.reshape(2, 4, 8).transpose(1, 2)))


PROGRAMS = [gather_then_product, product_then_scatter, product_then_reduce, weight_then_product, batched]  # fmt: skip
SHAPES = [[8, 8], [8, 8]]


class ByElements(FixedCost):
    """A product takes 1 us for an element of its result, a launch one for an element that it sends."""

    def compute_us(self, node):
        return float(node.meta["val"].numel()) if "mm" in str(node.target) else 0.0

    def link_us(self, launch, payload_bytes):
        return sum(payload_bytes) / 8

    def launch_us(self, launch):
        return self.link_us(launch, [launch.args[0].meta["val"].numel() * 8])


def traced(program, shapes=SHAPES):
    return trace(program, *shapes, world_size=RANKS, dtype=torch.float64)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_all_ways_to_chunk_keep_every_bit(program, parts):
    graph = traced(program)
    (product,) = collective_products(graph)
    inputs, tried = whole_numbers(SHAPES), 0
    for _, cut in product.seeds:
        trial = copy.deepcopy(graph)
        (its,) = collective_products(trial)
        region = its.region(parts, cut)
        if region is None:
            continue
        Cutter(trial, region).run()
        trial.lint()
        assert len(launches(trial)) == parts
        same(graph, trial, inputs)
        assert next(collective_products(trial), None) is None  # not again
        tried += 1
    assert tried


def chunked(program, cost=None, split=2, **given):
    graph = traced(program)
    record = run_pass(ChunkProducts(cost or ByElements(), split, **given), graph)
    return graph, record


def test_gather_and_product():
    graph, record = chunked(gather_then_product)
    assert record.counters == {"products": 1, "launches": 1, "joins": 1}
    assert_expected_inline(
        dump(graph),
        """\
x_1: [8, 8]
w_1: [8, 8]
slice_tensor: [4, 8] = slice(x_1, 0, 0, 4)
slice_tensor_1: [4, 8] = slice(x_1, 0, 4, 8)
all_gather_into_tensor_default: [8, 8] = all_gather_into_tensor(slice_tensor, 2, 0)
all_gather_into_tensor_default_1: [8, 8] = all_gather_into_tensor(slice_tensor_1, 2, 0)
wait_tensor_default: [8, 8] = wait_tensor(all_gather_into_tensor_default)
wait_tensor_default_1: [8, 8] = wait_tensor(all_gather_into_tensor_default_1)
mm_default: [8, 8] = mm(wait_tensor_default, w_1)
mm_default_1: [8, 8] = mm(wait_tensor_default_1, w_1)
reshape_default: [2, 1, 4, 8] = reshape(mm_default, [2, 1, 4, 8])
reshape_default_1: [2, 1, 4, 8] = reshape(mm_default_1, [2, 1, 4, 8])
cat_default: [2, 2, 4, 8] = cat([reshape_default, reshape_default_1], 1)
reshape_default_2: [16, 8] = reshape(cat_default, [16, 8])
return reshape_default_2""",
    )


def test_product_and_scatter():
    graph, _ = chunked(product_then_scatter)
    assert_expected_inline(
        dump(graph),
        """\
x_1: [8, 8]
w_1: [8, 8]
reshape_default: [2, 2, 2, 8] = reshape(x_1, [2, 2, 2, 8])
select_int: [2, 2, 8] = select(reshape_default, 1, 0)
reshape_default_1: [4, 8] = reshape(select_int, [4, 8])
select_int_1: [2, 2, 8] = select(reshape_default, 1, 1)
reshape_default_2: [4, 8] = reshape(select_int_1, [4, 8])
mm_default: [4, 8] = mm(reshape_default_1, w_1)
mm_default_1: [4, 8] = mm(reshape_default_2, w_1)
reduce_scatter_tensor_default: [2, 8] = reduce_scatter_tensor(mm_default, sum, 2, 0)
reduce_scatter_tensor_default_1: [2, 8] = reduce_scatter_tensor(mm_default_1, sum, 2, 0)
wait_tensor_default: [2, 8] = wait_tensor(reduce_scatter_tensor_default)
wait_tensor_default_1: [2, 8] = wait_tensor(reduce_scatter_tensor_default_1)
cat_default: [4, 8] = cat([wait_tensor_default, wait_tensor_default_1], 0)
return cat_default""",
    )


def test_product_and_reduce():
    graph, _ = chunked(product_then_reduce)
    assert_expected_inline(
        dump(graph),
        """\
x_1: [8, 8]
w_1: [8, 8]
slice_tensor: [4, 8] = slice(x_1, 0, 0, 4)
slice_tensor_1: [4, 8] = slice(x_1, 0, 4, 8)
mm_default: [4, 8] = mm(slice_tensor, w_1)
mm_default_1: [4, 8] = mm(slice_tensor_1, w_1)
all_reduce_default: [4, 8] = all_reduce(mm_default, sum, 0)
all_reduce_default_1: [4, 8] = all_reduce(mm_default_1, sum, 0)
wait_tensor_default: [4, 8] = wait_tensor(all_reduce_default)
wait_tensor_default_1: [4, 8] = wait_tensor(all_reduce_default_1)
cat_default: [8, 8] = cat([wait_tensor_default, wait_tensor_default_1], 0)
return cat_default""",
    )


def test_only_the_product_is_cut():
    graph, record = chunked(lambda x, w: torch.relu(gathered(torch.tanh(x)) @ w))
    assert record.changed
    names = [str(n.target) for n in graph.nodes]
    assert names.count("aten.relu.default") == names.count("aten.tanh.default") == 1


def test_layers_are_chunked_alike_and_numbers_stay():
    def layers(x, a, b):
        return reduced(reduced(x @ a) @ b)

    graph = traced(layers, [[8, 8]] * 3)
    whole = copy.deepcopy(graph)
    record = run_pass(ChunkProducts(ByElements()), graph)
    assert record.counters["products"] == 2
    assert "2 x all_reduce and its product" in record.notes[0]
    same(whole, graph, whole_numbers([[8, 8]] * 3))


def test_of_many_equal_layers_a_few_are_looked_at_and_all_are_chunked():
    def deep(x, *weights):
        for w in weights:
            x = torch.clamp(torch.tanh(torch.relu(reduced(x @ w) + 1) * 2) - 1, -1, 1).round()
        return x

    shapes = [[8, 8]] * 13
    graph = traced(deep, shapes)
    whole = copy.deepcopy(graph)
    record = run_pass(ChunkProducts(ByElements()), graph)
    assert record.counters["products"] == 12
    assert "equal layers" in record.notes[-1]
    same(whole, graph, whole_numbers(shapes))


@pytest.mark.parametrize(
    ("cost", "why"), [(FixedCost(launch=10, mm=10), "floors"), (FixedCost(launch=0, mm=10), "no link")]
)  # fmt: skip
def test_what_does_not_pay_is_left_whole(cost, why):
    graph, record = chunked(product_then_reduce, cost)
    assert not record.changed, why
    assert len(launches(graph)) == 1


class Kernel:
    collective = "all_reduce"

    def __init__(self, fused_us):
        self.fused_us = fused_us

    def predicted(self, launch, exposed_us):
        return Prediction(exposed_us + 64.0, self.fused_us)


def test_the_cheaper_of_chunks_and_a_fused_kernel_is_taken():
    _, slow = chunked(product_then_reduce, fusions=[Kernel(120.0)])
    graph, fast = chunked(product_then_reduce, fusions=[Kernel(70.0)])
    assert slow.changed and not fast.changed
    assert "left to a fused kernel" in fast.notes[0]
    assert len(launches(graph)) == 1


def test_rows_that_chunks_do_not_divide_are_left():
    graph = traced(product_then_reduce, [[6, 8], [8, 6]])
    assert not run_pass(ChunkProducts(ByElements(), 4), graph).changed
    assert run_pass(ChunkProducts(ByElements(), 3), graph).changed


def numbered(program=product_then_reduce, shapes=SHAPES):
    graph = traced(program, shapes)
    number_launches(graph, lambda name: (0, 1), Frame(), phase="inference", graph_id="g")
    return graph


def settled(**options):
    return PassOptions(passes=("chunk_products", "schedule"), **options)


def test_another_rank_follows_the_chunks_of_a_plan():
    graph = numbered()
    run_passes(graph, settled(split=2), cost=ByElements())
    plan = LaunchPlan.of(plan_of(graph).text)
    assert plan.chunks == {0: (2, "dimension 0 of one product")} and not plan.parts
    other = numbered()
    run_passes(other, settled(), cost=FixedCost(launch=1, mm=1), follow=plan)
    assert plan_of(other) == plan
    with pytest.raises(CannotFollowError, match="no collective product"):
        run_passes(numbered(shapes=[[1, 8], [8, 8]]), settled(), cost=ByElements(), follow=plan)


def test_unequal_shares_are_found(monkeypatch):
    compute = Cutter._compute

    def wrong(self, node, step):
        compute(self, node, step)
        if node in self.made:  # the second chunk sends what the first does
            first, second = self.made[node]
            second.update_arg(0, first.args[0])

    monkeypatch.setattr(Cutter, "_compute", wrong)
    with pytest.raises(InvariantError, match="send the same"):
        chunked(product_then_reduce)
