"""Whole programs, cut: a golden graph, drawn programs, and faults that are found."""

import pytest
import torch
from cutting import cut_behind, same, whole_numbers
from expecttest import assert_expected_inline
from fuzzing.parts import RANKS, SHAPES, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.errors import InvariantError
from inductor_passes.graph.collectives import launches
from inductor_passes.pipeline import run_pass
from inductor_passes.split.cut import Cutter
from inductor_passes.split.split_pass import SplitRegions
from inductor_passes.testing import FixedCost, dump, fake_group, trace

c10d = torch.ops._c10d_functional


def reduced(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def layers(x, a, b):
    """Two products, a sum over ranks behind each."""
    return reduced(reduced(x @ a) @ b)


LAYERS = [[4, 8], [8, 8], [8, 8]]
DEAR = FixedCost(launch=10, mm=10)


class ByRows(FixedCost):
    """Half the rows take half the time."""

    def compute_us(self, node):
        rows = node.meta["val"].shape[0] if hasattr(node.meta.get("val"), "shape") else 0
        return 10.0 * rows if "mm" in str(node.target) else 0.0

    def launch_us(self, launch):
        return 10.0 * launch.meta["val"].shape[0]

    def link_us(self, launch, payload_bytes):
        return sum(payload_bytes) / 32 * 10.0


def test_a_part_computes_while_the_others_sum_is_on_its_way():
    graph = trace(layers, *LAYERS)
    record = run_pass(SplitRegions(ByRows(), 2), graph)
    assert_expected_inline(
        dump(graph),
        """\
x_1: [4, 8]
a_1: [8, 8]
b_1: [8, 8]
slice_tensor: [2, 8] = slice(x_1, 0, 0, 2)
slice_tensor_1: [2, 8] = slice(x_1, 0, 2, 4)
mm_default: [2, 8] = mm(slice_tensor, a_1)
mm_default_1: [2, 8] = mm(slice_tensor_1, a_1)
all_reduce_default: [2, 8] = all_reduce(mm_default, sum, 0)
all_reduce_default_1: [2, 8] = all_reduce(mm_default_1, sum, 0)
wait_tensor_default: [2, 8] = wait_tensor(all_reduce_default)
wait_tensor_default_1: [2, 8] = wait_tensor(all_reduce_default_1)
mm_default_2: [2, 8] = mm(wait_tensor_default, b_1)
mm_default_3: [2, 8] = mm(wait_tensor_default_1, b_1)
all_reduce_default_2: [2, 8] = all_reduce(mm_default_2, sum, 0)
all_reduce_default_3: [2, 8] = all_reduce(mm_default_3, sum, 0)
wait_tensor_default_2: [2, 8] = wait_tensor(all_reduce_default_2)
wait_tensor_default_3: [2, 8] = wait_tensor(all_reduce_default_3)
cat_default: [4, 8] = cat([wait_tensor_default_2, wait_tensor_default_3], 0)
return cat_default""",
    )
    assert record.counters == {"launches": 2, "parts": 2, "nodes": 6, "joins": 1}
    assert record.split.launches == 2 and record.split.seed == "x_1"


def test_off_leaves_it_alone_and_auto_cuts_for_a_gain_only():
    graph = trace(layers, *LAYERS)
    before = dump(graph)
    # Each part costs what the whole does: nothing to gain.
    record = run_pass(SplitRegions(DEAR), graph)
    assert not record.changed and "left whole" in record.split.decision
    assert dump(graph) == before


def test_auto_cuts_where_that_pays():
    graph = trace(layers, *LAYERS)
    record = run_pass(SplitRegions(ByRows()), graph)
    split = record.split
    assert record.changed and split.parts in (2, 4)
    assert split.limit_us <= split.makespan_cut_us < split.makespan_uncut_us
    assert 0 < split.closed <= 1
    assert {tried.parts for tried in split.tried} == {2, 4}


def test_what_ended_a_region_is_told():
    def program(x, w):
        return reduced((reduced(x @ w)).flip(0) @ w)

    graph = trace(program, [4, 8], [8, 8])
    (flip,) = graph.find_nodes(op="call_function", target=torch.ops.aten.flip.default)
    flip.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    y = x.flip(0)\n'
    record = run_pass(SplitRegions(ByRows(), 2), graph)
    (end,) = record.split.ended
    assert end.operator == "aten.flip.default" and end.reason == "it has no rule"
    assert end.stack == "model.py:7: y = x.flip(0)"
    assert any("ends at 1 x aten.flip.default: it has no rule" in note for note in record.notes)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(3, 2), (4, 3), (4, 8)],
    ids=["odd rows", "three parts of four", "more parts than rows"],
)
def test_rows_that_are_not_divided_leave_a_graph_whole(rows, parts):
    """A shorter last part would be one more kernel of another shape: refused, and said."""
    graph = trace(layers, [rows, 7], [7, 7], [7, 7])
    before = dump(graph)
    record = run_pass(SplitRegions(DEAR, parts), graph)
    assert not record.changed and dump(graph) == before
    assert f"no input leads to a launch in {parts} equal parts" in record.notes[0]


def test_graphs_of_symbolic_sizes_and_writes_are_refused():
    graph = trace(layers, *LAYERS, dynamic=True)
    record = run_pass(SplitRegions(DEAR, 2), graph)
    assert record.status == "skipped" and "sizes are known" in record.reason
    graph = trace(layers, *LAYERS)
    mm = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    with graph.inserting_after(mm):
        graph.call_function(torch.ops.aten.add_.Tensor, (mm, 1))
    assert run_pass(SplitRegions(DEAR, 2), graph).status == "skipped"


class LosesShare(SplitRegions):
    def cut(self, graph, region):
        cutter = super().cut(graph, region)
        launch = launches(graph)[1]
        launch.args = (graph.find_nodes(op="placeholder")[0], *launch.args[1:])
        return cutter


class SendsTwice(SplitRegions):
    def cut(self, graph, region):
        cutter = super().cut(graph, region)
        first, second, *_ = launches(graph)
        second.args = (first.args[0], *second.args[1:])
        return cutter


class OtherSum(SplitRegions):
    def cut(self, graph, region):
        cutter = super().cut(graph, region)
        launch = launches(graph)[1]
        launch.args = (launch.args[0], "max", *launch.args[2:])
        return cutter


class ReturnsPart(SplitRegions):
    def cut(self, graph, region):
        cutter = super().cut(graph, region)
        output = graph.output_node()
        output.args = (output.args[0].args[0][0],)
        return cutter


@pytest.mark.parametrize("cls", [LosesShare, SendsTwice, OtherSum, ReturnsPart])
def test_planted_faults_are_found(cls):
    with pytest.raises(InvariantError, match="cut the graph wrongly"):
        run_pass(cls(ByRows(), 2), trace(layers, *LAYERS))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.integers(0, 1), st.integers(0, 2))
def test_drawn_programs_keep_every_bit_on_all_ranks(number, parts, dim, source):
    with fake_group(RANKS):
        graph = trace(drawn(number, exact=True), *SHAPES, dtype=torch.float64)
        graph.eliminate_dead_code()
        cut, _, _ = cut_behind(graph, parts, dim, source)
        same(graph, cut, whole_numbers(SHAPES, most=2))


def test_parts_that_send_the_same_are_found(monkeypatch):
    compute = Cutter._compute

    def wrong(self, node, step):
        compute(self, node, step)
        if node in self.made:  # the second part sends what the first does
            first, second = self.made[node]
            second.update_arg(0, first.args[0])

    monkeypatch.setattr(Cutter, "_compute", wrong)
    with pytest.raises(InvariantError, match="send the same"):
        run_pass(SplitRegions(ByRows(), 2), trace(layers, *LAYERS))
