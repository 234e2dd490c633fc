import pytest
import torch
from expecttest import TestCase

from inductor_passes.base import PassStats
from inductor_passes.errors import InvariantError
from inductor_passes.pipeline import run_pass
from inductor_passes.reorder import HoistLaunches
from inductor_passes.testing import FixedCost, dump, trace

c10d = torch.ops._c10d_functional


def layers(x, *weights):
    for w in weights:
        x = (x @ c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))).relu()
    return x


def two_groups(x, v, w):
    y = x @ x
    a = c10d.wait_tensor(c10d.all_gather_into_tensor(v, 8, "0"))
    b = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "other"))
    return y @ a @ b


def cast_weight(x, w):
    y = x @ x
    half = w.to(torch.bfloat16)
    full = c10d.wait_tensor(c10d.all_gather_into_tensor(half, 8, "0"))
    return y.to(torch.bfloat16) @ full


def reduced(x):
    y = x @ x
    return c10d.wait_tensor(c10d.all_reduce(y, "sum", "0")) + 1


SHAPES = [[16, 16], [2, 16], [2, 16], [2, 16], [2, 16]]


class Swaps(HoistLaunches):
    """Planted bug: the first two launches of a group change places."""

    def run(self, graph):
        first, second = graph.find_nodes(
            op="call_function", target=c10d.all_gather_into_tensor.default
        )[:2]
        first.prepend(second)
        return PassStats(True)


class TestHoistLaunches(TestCase):
    def test_each_gather_starts_one_layer_ahead(self):
        graph = trace(layers, *SHAPES)
        record = run_pass(HoistLaunches(FixedCost(launch=8, mm=10)), graph)
        self.assertEqual(record.counters, {"launches": 4, "launches_hoisted": 3})
        self.assertExpectedInline(
            dump(graph),
            """\
arg0_1: [16, 16]
arg1_1: [2, 16]
arg2_1: [2, 16]
arg3_1: [2, 16]
arg4_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(arg1_1, 8, 0)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
all_gather_into_tensor_1: [16, 16] = all_gather_into_tensor(arg2_1, 8, 0)
mm: [16, 16] = mm(arg0_1, wait_tensor)
relu: [16, 16] = relu(mm)
wait_tensor_1: [16, 16] = wait_tensor(all_gather_into_tensor_1)
all_gather_into_tensor_2: [16, 16] = all_gather_into_tensor(arg3_1, 8, 0)
mm_1: [16, 16] = mm(relu, wait_tensor_1)
relu_1: [16, 16] = relu(mm_1)
wait_tensor_2: [16, 16] = wait_tensor(all_gather_into_tensor_2)
all_gather_into_tensor_3: [16, 16] = all_gather_into_tensor(arg4_1, 8, 0)
mm_2: [16, 16] = mm(relu_1, wait_tensor_2)
relu_2: [16, 16] = relu(mm_2)
wait_tensor_3: [16, 16] = wait_tensor(all_gather_into_tensor_3)
mm_3: [16, 16] = mm(relu_2, wait_tensor_3)
relu_3: [16, 16] = relu(mm_3)
return relu_3""",
        )

    def test_a_slow_link_starts_gathers_further_ahead(self):
        graph = trace(layers, *SHAPES)
        run_pass(HoistLaunches(FixedCost(launch=18, mm=10)), graph)
        order = [n.name for n in graph.nodes if n.op == "call_function"]
        self.assertEqual(order[:2], ["all_gather_into_tensor", "all_gather_into_tensor_1"])

    def test_results_in_flight_stay_below_the_budget(self):
        gathered_bytes = 16 * 16 * 4
        for held, ahead in ((3, 3), (2, 2), (1, 1)):
            graph = trace(layers, *SHAPES)
            pass_ = HoistLaunches(FixedCost(launch=100, mm=1), budget_bytes=held * gathered_bytes)
            run_pass(pass_, graph)
            in_flight = peak = 0
            for node in graph.nodes:
                in_flight += "all_gather" in node.name
                peak = max(peak, in_flight)
                in_flight -= "wait" in node.name
            self.assertEqual(peak, ahead, dump(graph))

    def test_groups_are_hoisted_alone(self):
        graph = trace(two_groups, [16, 16], [2, 16], [2, 16])
        run_pass(HoistLaunches(FixedCost(launch=8, mm=10)), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
v_1: [2, 16]
w_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(v_1, 8, 0)
all_gather_into_tensor_1: [16, 16] = all_gather_into_tensor(w_1, 8, other)
mm: [16, 16] = mm(x_1, x_1)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
wait_tensor_1: [16, 16] = wait_tensor(all_gather_into_tensor_1)
mm_1: [16, 16] = mm(mm, wait_tensor)
mm_2: [16, 16] = mm(mm_1, wait_tensor_1)
return mm_2""",
        )

    def test_the_cast_moves_with_its_launch(self):
        graph = trace(cast_weight, [16, 16], [2, 16])
        run_pass(HoistLaunches(FixedCost(launch=8, mm=10)), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
w_1: [2, 16]
_to_copy: [2, 16] = _to_copy(w_1, dtype=torch.bfloat16)
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(_to_copy, 8, 0)
mm: [16, 16] = mm(x_1, x_1)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
_to_copy_1: [16, 16] = _to_copy(mm, dtype=torch.bfloat16)
mm_1: [16, 16] = mm(_to_copy_1, wait_tensor)
return mm_1""",
        )

    def test_a_launch_stays_below_what_it_reads(self):
        graph = trace(reduced, [16, 16])
        before = dump(graph)
        self.assertFalse(run_pass(HoistLaunches(FixedCost(launch=8, mm=10)), graph).changed)
        self.assertEqual(dump(graph), before)

    def test_second_run_changes_nothing(self):
        for program, shapes in ((layers, SHAPES), (cast_weight, SHAPES[:2])):
            for budget in (1 << 30, 2048):
                pass_ = HoistLaunches(FixedCost(launch=13, mm=10, _to_copy=1), budget_bytes=budget)
                graph = trace(program, *shapes)
                run_pass(pass_, graph)
                once = dump(graph)
                self.assertFalse(run_pass(pass_, graph).changed)
                self.assertEqual(dump(graph), once)

    def test_nothing_passes_a_barrier(self):
        from dynamo_dist.trace.lowering import ops  # noqa: F401  (defines the operator)

        def fenced(x, v, w):
            a = c10d.wait_tensor(c10d.all_gather_into_tensor(v, 8, "0"))
            y = x @ x
            token = torch.ops.dynamo_dist.barrier(x.device, [], 1.0, "0", 1)
            torch.ops.dynamo_dist.wait_tensor(token, 2)
            b = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
            return y @ a @ b

        graph = trace(fenced, [16, 16], [2, 16], [2, 16])
        run_pass(HoistLaunches(FixedCost(launch=100, mm=10)), graph)
        names = [n.name for n in graph.nodes if n.op == "call_function"]
        barrier = names.index("barrier")
        self.assertLess(names.index("all_gather_into_tensor"), names.index("mm"))
        self.assertLess(names.index("mm"), barrier)
        self.assertGreater(names.index("all_gather_into_tensor_1"), barrier)

    def test_configuration_is_in_the_digest(self):
        base = HoistLaunches(FixedCost())
        self.assertNotEqual(base.digest(), HoistLaunches(FixedCost(), lead=2.0).digest())
        self.assertNotEqual(base.digest(), HoistLaunches(FixedCost(launch=9)).digest())


def test_a_swap_within_a_group_is_caught():
    graph = trace(layers, *SHAPES)
    with pytest.raises(InvariantError, match="launches of group 0 changed their order"):
        run_pass(Swaps(FixedCost()), graph)


def crossing(x, v, w):
    y = x @ x
    y = y @ y
    a = c10d.wait_tensor(c10d.all_gather_into_tensor(v, 8, "0"))
    y = y @ a
    b = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "other"))
    return y @ b


@pytest.mark.parametrize(("keep_order", "order"), [(False, ["other", "0"]), (True, ["0", "other"])])
def test_one_order_over_all_groups_where_ranks_hold_different_forms(keep_order, order):
    graph = trace(crossing, [16, 16], [2, 16], [2, 16])
    # What is gathered second takes long, so that alone it would start first.
    cost = FixedCost(launch=8, mm=4)
    cost.launch_us = lambda node: 60.0 if node.args[2] == "other" else 1.0
    run_pass(HoistLaunches(cost, keep_order=keep_order), graph)
    found = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert [node.args[2] for node in found] == order, dump(graph)
