import pytest
import torch
from expecttest import TestCase

from inductor_passes.base import PassStats
from inductor_passes.errors import InvariantError
from inductor_passes.pipeline import run_pass
from inductor_passes.reorder import SinkWaits
from inductor_passes.testing import dump, trace

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def gathered_weight(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ w_full  # x @ x does not need w_full, so it can hide the gather


def two_gathers(x, v, w):
    v_full = c10d.wait_tensor(c10d.all_gather_into_tensor(v, 8, "0"))
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return x @ v_full, x @ w_full


def unpacked(x, w):
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 2, "0"))
    first, second = gathered.split(w.shape[0])
    return (x @ x) @ torch.cat([first, second], 1)


def overwritten(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    w.copy_(w + x[: w.shape[0]])
    return x, w_full


def chained(x):
    return c10d.wait_tensor(c10d.all_reduce(x @ x, "sum", "0")) + 1


class Duplicates(SinkWaits):
    """Planted bug: waits twice for the first launch."""

    def run(self, graph):
        stats = super().run(graph)
        wait = next(n for n in graph.nodes if n.target is c10d.wait_tensor.default)
        with graph.inserting_after(wait):
            twin = graph.call_function(c10d.wait_tensor.default, wait.args)
        next(iter(wait.users)).replace_input_with(wait, twin)
        return stats


class Recomputes(SinkWaits):
    """Planted bug: a pass that promises only to move nodes adds one."""

    def run(self, graph):
        mm = next(n for n in graph.nodes if n.target is aten.mm.default)
        with graph.inserting_after(mm):
            graph.call_function(aten.mm.default, mm.args)
        return PassStats(True)


class TestSinkWaits(TestCase):
    def test_wait_sinks_below_independent_matmul(self):
        graph = trace(gathered_weight, [16, 16], [2, 16])
        record = run_pass(SinkWaits(), graph)
        self.assertEqual(record.counters, {"waits_sunk": 1})
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
w_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(w_1, 8, 0)
mm: [16, 16] = mm(x_1, x_1)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
mm_1: [16, 16] = mm(mm, wait_tensor)
return mm_1""",
        )

    def test_waits_sink_to_their_own_users(self):
        graph = trace(two_gathers, [16, 16], [2, 16], [2, 16])
        run_pass(SinkWaits(), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
v_1: [2, 16]
w_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(v_1, 8, 0)
all_gather_into_tensor_1: [16, 16] = all_gather_into_tensor(w_1, 8, 0)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
mm: [16, 16] = mm(x_1, wait_tensor)
wait_tensor_1: [16, 16] = wait_tensor(all_gather_into_tensor_1)
mm_1: [16, 16] = mm(x_1, wait_tensor_1)
return (mm, mm_1)""",
        )

    def test_a_wait_stays_above_a_write_to_what_is_still_being_sent(self):
        graph = trace(overwritten, [16, 16], [2, 16])
        run_pass(SinkWaits(), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
w_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(w_1, 8, 0)
slice_1: [2, 16] = slice(x_1, 0, 0, 2)
add: [2, 16] = add(w_1, slice_1)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
copy_: [2, 16] = copy_(w_1, add)
return (x_1, wait_tensor)""",
        )

    def test_unpacking_sinks_with_its_wait(self):
        graph = trace(unpacked, [16, 16], [16, 8])
        run_pass(SinkWaits(), graph)
        self.assertExpectedInline(
            dump(graph),
            """\
x_1: [16, 16]
w_1: [16, 8]
all_gather_into_tensor: [32, 8] = all_gather_into_tensor(w_1, 2, 0)
mm: [16, 16] = mm(x_1, x_1)
wait_tensor: [32, 8] = wait_tensor(all_gather_into_tensor)
split: ([16, 8], [16, 8]) = split(wait_tensor, 16)
getitem: [16, 8] = getitem(split, 0)
getitem_1: [16, 8] = getitem(split, 1)
cat: [16, 16] = cat([getitem, getitem_1], 1)
mm_1: [16, 16] = mm(mm, cat)
return mm_1""",
        )

    def test_a_chain_is_left_alone(self):
        graph = trace(chained, [16, 16])
        before = dump(graph)
        record = run_pass(SinkWaits(), graph)
        self.assertFalse(record.changed)
        self.assertEqual(dump(graph), before)

    def test_second_run_changes_nothing(self):
        graph = trace(unpacked, [16, 16], [16, 8])
        run_pass(SinkWaits(), graph)
        once = dump(graph)
        self.assertFalse(run_pass(SinkWaits(), graph).changed)
        self.assertEqual(dump(graph), once)

    def test_a_mutating_graph_is_refused(self):
        graph = trace(gathered_weight, [16, 16], [2, 16])
        mm = next(n for n in graph.nodes if n.target is aten.mm.default)
        with graph.inserting_after(mm):
            graph.call_function(aten.add_.Tensor, (mm, 1))
        before = dump(graph)
        record = run_pass(SinkWaits(), graph)
        self.assertEqual(record.status, "skipped")
        self.assertIn("mutates an input", record.reason)
        self.assertEqual(dump(graph), before)

    def test_an_input_written_before_the_end_is_a_mutation(self):
        def program(x, y):
            gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(y, 8, "0"))
            read = x / (1 + gathered)
            x.copy_(gathered)
            return read, x.tanh()

        graph = trace(program, [16, 16], [2, 16])
        self.assertEqual(run_pass(SinkWaits(), graph).status, "skipped")


@pytest.mark.parametrize(
    ("broken", "message"),
    [(Duplicates, "2 waits instead of 1"), (Recomputes, "only moves nodes added one")],
)
def test_planted_bugs_are_caught(broken, message):
    graph = trace(gathered_weight, [16, 16], [2, 16])
    with pytest.raises(InvariantError, match=message):
        run_pass(broken(), graph)
