"""What holds for every rewrite."""

import pytest
import torch

from inductor_passes.graph_pass import Numerics, PassContext
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass, selected_passes
from inductor_passes.rewrite import REWRITES, MergeTiny
from inductor_passes.testing import FixedCost, dump, trace

c10d = torch.ops._c10d_functional


def gathered_weight(x, w):
    return x @ c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))


@pytest.mark.parametrize("cls", REWRITES)
def test_a_mutating_graph_is_refused(cls):
    graph = trace(gathered_weight, [16, 16], [2, 16])
    mm = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    with graph.inserting_after(mm):
        graph.call_function(torch.ops.aten.add_.Tensor, (mm, 1))
    assert run_pass(cls(), graph).status == "skipped"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cls", REWRITES)
def test_a_plain_gather_is_left_alone(cls, dynamic):
    graph = trace(gathered_weight, [16, 16], [2, 16], dynamic=dynamic)
    before = dump(graph)
    assert not run_pass(cls(), graph).changed
    assert dump(graph) == before


def test_on_by_default_and_before_scheduling():
    names = [p.name for p in selected_passes(PassContext(FixedCost()), PassOptions())]
    assert names[: len(REWRITES)] == [cls.name for cls in REWRITES]


def test_exact_runs_only_what_keeps_every_bit():
    names = {p.name for p in selected_passes(PassContext(FixedCost()), PassOptions(exact=True))}
    for cls in REWRITES:
        assert (cls.name in names) == (cls.numerics is Numerics.BITWISE)


def test_a_number_read_from_a_merged_sum_keeps_its_symbol():
    def program(x, y):
        one, other = (c10d.wait_tensor(c10d.all_reduce(each.sum(), "sum", "0")) for each in (x, y))
        return one.item(), other * 2

    graph = trace(program, [2, 8], [4, 3])
    shape_env = (
        next(n for n in graph.nodes if n.op == "placeholder").meta["val"].fake_mode.shape_env
    )
    assert run_pass(MergeTiny(), graph).changed
    assert not shape_env.pending_fresh_unbacked_symbols
