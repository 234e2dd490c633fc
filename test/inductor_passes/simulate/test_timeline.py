import dataclasses

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.records import TimelineRecord
from inductor_passes.simulate import simulate
from inductor_passes.testing import FixedCost, fake_group, trace

c10d = torch.ops._c10d_functional
COST = FixedCost(launch=8.0, mm=10.0)


def picture(timeline):
    """Spans as lines: lane, start-end, what."""
    return "\n".join(
        f"{s.lane}: {s.start_us:g}-{s.start_us + s.duration_us:g} {s.kind} {s.name}"
        for s in timeline.spans
    )


def gathered_weight(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ w_full


def prefetched_weight(x, w):
    launch = c10d.all_gather_into_tensor(w, 8, "0")
    return (x @ x) @ c10d.wait_tensor(launch)


class TestSimulate(TestCase):
    def test_exposed_gather(self):
        timeline = simulate(trace(gathered_weight, [16, 16], [2, 16]), COST)
        self.assertExpectedInline(
            picture(timeline),
            """\
0: 0-8 all_gather all_gather_into_tensor
compute: 0-8 wait wait_tensor
compute: 8-18 compute mm
compute: 18-28 compute mm_1""",
        )
        self.assertEqual((timeline.makespan_us, timeline.compute_us), (28.0, 20.0))
        self.assertEqual((timeline.exposed_us, timeline.communication_us), (8.0, 8.0))
        self.assertEqual(timeline.exposed_by_launch, {"all_gather_into_tensor": 8.0})

    def test_hidden_gather(self):
        timeline = simulate(trace(prefetched_weight, [16, 16], [2, 16]), COST)
        self.assertExpectedInline(
            picture(timeline),
            """\
0: 0-8 all_gather all_gather_into_tensor
compute: 0-10 compute mm
compute: 10-20 compute mm_1""",
        )
        self.assertEqual((timeline.makespan_us, timeline.exposed_us), (20.0, 0.0))
        self.assertEqual(timeline.exposed_by_launch, {"all_gather_into_tensor": 0.0})

    def test_groups_have_their_own_channels(self):
        def program(x, y):
            first = c10d.all_reduce(x, "sum", "rows")
            second = c10d.all_reduce(y, "sum", "columns")
            third = c10d.all_reduce(y, "sum", "rows")
            return [c10d.wait_tensor(t) for t in (first, second, third)]

        self.assertExpectedInline(
            picture(simulate(trace(program, [4], [4]), COST)),
            """\
rows: 0-8 all_reduce all_reduce
columns: 0-8 all_reduce all_reduce_1
rows: 8-16 all_reduce all_reduce_2
compute: 0-8 wait wait_tensor
compute: 8-16 wait wait_tensor_2""",
        )

    def test_coalesced_launch_is_one_with_several_waits(self):
        def program(x, y):
            parts = c10d.all_reduce_coalesced([x, y], "sum", "0")
            return [c10d.wait_tensor(part) for part in parts]

        timeline = simulate(trace(program, [4], [4]), COST)
        self.assertEqual((timeline.communication_us, timeline.exposed_us), (8.0, 8.0))

    def test_a_wait_on_a_view_waits_for_the_launch_behind_it(self):
        def program(x):
            return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0").view(2, 2)) @ x.view(2, 2)

        self.assertEqual(simulate(trace(program, [4]), COST).makespan_us, 18.0)

    def test_a_launch_that_nobody_waits_for(self):
        def program(x):
            c10d.all_reduce(x, "sum", "0")
            return x + 1

        timeline = simulate(trace(program, [4]), COST)
        self.assertEqual((timeline.makespan_us, timeline.exposed_us), (8.0, 8.0))
        self.assertEqual(timeline.exposed_by_launch, {"all_reduce": 8.0})

    def test_a_wait_for_an_earlier_graph_is_free(self):
        timeline = simulate(trace(lambda x: c10d.wait_tensor(x) @ x, [4, 4]), COST)
        self.assertEqual((timeline.makespan_us, timeline.exposed_us), (10.0, 0.0))

    def test_a_blocking_collective_holds_the_compute_stream(self):
        def program(x):
            return (x @ x) @ torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, "0").view(8, 8)

        with fake_group():
            timeline = simulate(trace(program, [8, 8]), COST)
        self.assertExpectedInline(
            picture(timeline),
            """\
compute: 0-10 compute mm
0: 10-18 all_to_all shard_dim_alltoall
compute: 10-18 wait shard_dim_alltoall
compute: 18-28 compute mm_1""",
        )
        self.assertEqual((timeline.makespan_us, timeline.exposed_us), (28.0, 8.0))

    def test_order_is_what_counts_and_the_graph_stays_as_it_was(self):
        graph = trace(gathered_weight, [16, 16], [2, 16])
        nodes = {node.name: node for node in graph.nodes}
        before = list(graph.nodes)
        self.assertEqual(simulate(graph, COST).makespan_us, 28.0)
        self.assertEqual(list(graph.nodes), before)
        nodes["mm_1"].prepend(nodes["wait_tensor"])
        self.assertEqual(simulate(graph, COST).makespan_us, 20.0)

    def test_graph_without_collectives(self):
        timeline = simulate(trace(torch.mm, [4, 4], [4, 4]), COST)
        self.assertEqual((timeline.makespan_us, timeline.exposed_us), (10.0, 0.0))
        self.assertEqual((timeline.exposed_by_launch, timeline.peak_bytes), ({}, 64))

    def test_record_says_the_same(self):
        timeline = simulate(trace(gathered_weight, [16, 16], [2, 16]), COST)
        record = timeline.record()
        self.assertIsInstance(record, TimelineRecord)
        kept = dataclasses.asdict(timeline)
        del kept["exposed_by_launch"], kept["live_bytes"]
        self.assertEqual(dataclasses.asdict(record), kept)


if __name__ == "__main__":
    run_tests()
