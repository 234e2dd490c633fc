"""Several regions in one graph: where they begin, in how many parts each is, and what ranks
share of them.
"""

import dataclasses

import pytest
import torch
from cutting import same, whole_numbers

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.cost.topology import LinkProtocol
from inductor_passes.graph.collectives import launches
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.ranks.collective_trace import Frame, LaunchPlan, number_launches, plan_of
from inductor_passes.split.candidates import Way, from_inputs, from_inside, lay, like
from inductor_passes.split.cut import cut_all
from inductor_passes.split.price import BACKWARD, FORWARD, backward_of, halves
from inductor_passes.split.rules.rule import Cut
from inductor_passes.split.split_pass import SplitRegions
from inductor_passes.testing import FixedCost, dump, fake_group, trace

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
RANKS = 4


class ByRows(FixedCost):
    """Work by elements, and a start for each launch."""

    start = 1.0

    def compute_us(self, node):
        return float(node.meta["val"].numel()) if "mm" in str(node.target) else 0.0

    def link_us(self, launch, payload_bytes):
        return sum(payload_bytes) / 4 + self.start

    def launch_us(self, launch):
        return self.link_us(launch, [launch.meta["val"].numel() * 4])


def reduced(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def turned(x, rows):
    """Other rows, whose order nothing in parts has."""
    return x.flip(0).cumsum(0)[:rows]


def two(x, a, b):
    """Two layers of eight rows, and two of six."""
    y = turned(reduced(reduced(x @ a) @ b), 6)
    return reduced(reduced(y @ a) @ b)


SHAPES = [[8, 6], [6, 6], [6, 6]]


def numbered(fn=two, shapes=SHAPES):
    graph = trace(fn, *shapes, world_size=RANKS)
    stream = number_launches(
        graph, lambda name: tuple(range(RANKS)), Frame(), phase="inference", graph_id="g"
    )
    return graph, stream


def test_next_region_has_as_many_chunks_as_the_one_before():
    graph, _ = numbered()
    record = run_pass(SplitRegions(ByRows()), graph)
    first, second = record.split.regions
    assert (first.parts, first.seed, first.launches) == (4, "x_1", 2)
    assert (second.parts, second.seed, second.launches) == (2, "slice_1", 2)  # six rows
    assert record.split.launches == 4 and len(launches(graph)) == 2 * 4 + 2 * 2
    assert second.before_us == first.after_us > second.after_us
    assert record.split.makespan_uncut_us == first.before_us
    assert record.split.makespan_cut_us == second.after_us
    assert record.split.decision == (
        "cut in 4 parts along dimension 0 of %x_1; cut in 2 parts along dimension 0 of %slice_1"
    )
    assert any(
        "cut in 2 parts along dimension 0 of %slice_1: 2 launches" in n for n in record.notes
    )
    assert any("  ends at 1 x aten.flip.default: it has no rule" in note for note in record.notes)


def test_several_regions_compute_what_the_whole_graph_does():
    graph = trace(two, *SHAPES, world_size=2, dtype=torch.float64)
    cut = trace(two, *SHAPES, world_size=2, dtype=torch.float64)
    with fake_group(2):
        assert run_pass(SplitRegions(ByRows()), cut).split.regions[1].parts == 2
        same(graph, cut, whole_numbers(SHAPES, most=2))


def test_region_that_lengthens_the_step_is_not_split():
    class FarStart(ByRows):
        def link_us(self, launch, payload_bytes):
            small = sum(payload_bytes) < 80  # a part of the six rows
            return sum(payload_bytes) / 4 + (50.0 if small else 1.0)

    graph, _ = numbered()
    record = run_pass(SplitRegions(FarStart()), graph)
    (only,) = record.split.regions
    assert only.seed == "x_1" and record.split.makespan_cut_us < record.split.makespan_uncut_us


def layer(x, a, b):
    """A region of six rows between others of eight, in each layer."""
    y = turned(reduced(x @ a), 6)
    z = reduced(reduced(y @ b) @ a)
    return turned(torch.cat([z, z]), 8)


def test_regions_of_layers_that_are_alike_are_cut_alike():
    def layers(x, a, b):
        for _ in range(3):
            x = layer(x, a, b)
        return x

    graph, stream = numbered(layers)
    before = len(launches(graph))
    record = run_pass(SplitRegions(ByRows()), graph)
    alike = [region for region in record.split.regions if region.count > 1]
    assert alike and all(region.count == 3 for region in alike)
    assert alike[0].launches == 6 and "and 2 like it" in record.split.decision
    assert before == 9 < len(launches(graph))
    # Another rank finds them all by what the plan says of their launches.
    plan, (other, _) = plan_of(graph), numbered(layers)
    run_passes(
        other, PassOptions(extra={"split": "auto"}), cost=ByRows(), follow=LaunchPlan.of(plan.text)
    )
    assert plan_of(other).text_for(stream) == plan.text_for(stream)


def test_ranks_follow_regions_in_unlike_parts():
    graph, stream = numbered()
    run_passes(graph, PassOptions(extra={"split": "auto"}), cost=ByRows())
    plan = plan_of(graph)
    assert {parts for parts, _ in plan.parts.values()} == {2, 4}
    other, _ = numbered()
    run_passes(
        other, PassOptions(extra={"split": "auto"}), cost=ByRows(), follow=LaunchPlan.of(plan.text)
    )
    assert plan_of(other).text_for(stream) == plan.text_for(stream)


def test_region_reads_anothers_chunked_value_joined():
    """The backward reads in two parts what the forward has in four."""

    def step(x, a, tangents):
        y = reduced(x @ a)
        return y.sin(), reduced((tangents * y.cos()) @ a.t())

    with fake_group(2):
        graph = trace(step, [8, 8], [8, 8], [8, 8], dtype=torch.float64)
        graph.eliminate_dead_code()
        whole = trace(step, [8, 8], [8, 8], [8, 8], dtype=torch.float64)
        ways = [Way("x_1", Cut(0), 4, FORWARD), Way("x_1", Cut(0), 2, BACKWARD)]
        (forward,), (backward,) = lay(graph, ways)
        assert not forward.steps.keys() & backward.steps.keys()
        first, second = cut_all(graph, [forward, backward])
        graph.lint()
        assert [len(parts) for made in (first, second) for parts in made.made.values()] == [4, 2]
        same(whole, graph, whole_numbers([[8, 8]] * 3, most=2), tolerance=1e-12)


def joint(x, a, tangents):
    """A forward that waits for its launch, and a backward that could compute beside it."""
    y = reduced(x @ a)
    grad = tangents @ a
    return y, (grad @ a) @ a


def test_backward_compute_hides_no_collective_of_the_forward():
    def at_once(x, a, grad):
        return joint(x, a, grad)

    graph = trace(at_once, [8, 8], [8, 8], [8, 8])
    graph.eliminate_dead_code()
    assert backward_of(graph) == frozenset() and halves(graph) == (graph,)
    in_one = run_pass(SplitRegions(ByRows()), graph).split
    graph = trace(joint, [8, 8], [8, 8], [8, 8])
    graph.eliminate_dead_code()
    forward, backward = halves(graph)
    assert len(launches(forward)) == 1 and not launches(backward)
    assert len(backward_of(graph)) == 3
    record = run_pass(SplitRegions(ByRows()), graph).split
    # In one graph the launch hides behind the three products; in two nothing does.
    assert in_one.makespan_uncut_us == 4 * 64
    assert record.makespan_uncut_us == 4 * 64 + 65
    assert record.limit_us >= 4 * 64


class Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduced(x)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad)


def test_halves_of_a_joint_graph_are_cut_in_their_own_parts():
    """Forward pays in four parts; launches of the backward are so dear to start that it pays in
    none.
    """

    class DearBackward(ByRows):
        def launch_us(self, launch):
            late = "neg" in str(launch.args[0].target)
            return super().launch_us(launch) + (500.0 if late else 0.0)

        def link_us(self, launch, payload_bytes):
            late = "neg" in str(launch.args[0].target)
            return super().link_us(launch, payload_bytes) + (500.0 if late else 0.0)

    def step(x, a, tangents):
        y = reduced(reduced(x @ a) @ a)
        grad = c10d.wait_tensor(c10d.all_reduce(-((tangents @ a) * y), "max", "0"))
        return y, grad @ a

    graph = trace(step, [8, 8], [8, 8], [8, 8])
    graph.eliminate_dead_code()
    record = run_pass(SplitRegions(DearBackward()), graph)
    (only,) = record.split.regions
    assert only.half == FORWARD and only.launches == 2 and "in the forward" in record.notes[0]
    kinds = [launch.args[1] for launch in launches(graph)]
    assert kinds.count("max") == 1 and kinds.count("sum") == 2 * only.parts


def test_inner_values_are_visited_once_in_graph_order():
    graph, _ = numbered()
    front = list(from_inputs(graph, 2))
    inside = list(from_inside(graph, 2, front))
    assert [region.seed.name for region in inside][:1] == ["slice_1"]
    assert like(inside[0].seed) == like(inside[0].seed)
    taken = {node for region in inside for node in region.steps}
    assert not any(r.steps.keys() & taken for r in from_inside(graph, 2, front, taken))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_number_of_parts_holds_for_all_regions(parts):
    graph, _ = numbered()
    record = run_pass(SplitRegions(ByRows(), parts), graph)
    assert {region.parts for region in record.split.regions} == {parts}
    assert dump(graph).count("all_reduce(") == record.split.launches * parts + 4 - (
        record.split.launches
    )


def test_small_kernels_stay_unsplit_where_starts_take_the_cores():
    """Twice as many launches are no gain where each takes as much of the processor as a kernel."""

    def small(x, *weights):
        for weight in weights:
            x = reduced(x @ weight)
        return x

    def decided(launching_us):
        figures = {"intra_gb_per_s": 10.0, "launching_us": launching_us, "all_reduce_in_node": None}
        protocol = LinkProtocol("only", 5.0, 1.0, 1.0, 3.0, 1.0)
        topology = dataclasses.replace(load_topology("cpu-gloo"), protocols=(protocol,), **figures)
        graph = trace(small, [256, 192], *[[192, 192]] * 4, world_size=2)
        return run_pass(SplitRegions(TopologyCostModel(topology)), graph).split

    assert decided(0.0).parts > 1
    shipped = load_topology("cpu-gloo").launching_us
    whole = decided(shipped)
    assert shipped > 0 and whole.parts == 1 and "to gain, less than 3%" in whole.decision
