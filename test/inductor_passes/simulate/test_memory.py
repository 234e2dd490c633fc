import torch
from hypothesis import given
from hypothesis import strategies as st
from small_problems import peak_of_values
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.simulate.timeline import graph_live_bytes, memory_owners, program_of
from inductor_passes.testing import FixedCost, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
KB = 1024  # bytes of a value of 256 float32


def peak(fn, *shapes, **options):
    graph = trace(fn, *shapes, **options)
    owners = memory_owners(graph)
    live = graph_live_bytes(
        graph, owners, program_of(list(graph.nodes), owners, FixedCost()).awaits
    )
    return max(live)


class TestValues(TestCase):
    def test_freed_after_the_last_use(self):
        # 0 -> 1 -> 2, each used by the next: two are alive at once.
        self.assertEqual(peak_of_values([10, 20, 40], [[], [0], [1]]), 60)
        self.assertEqual(peak_of_values([10, 20, 40], [[], [0], [1, 0]]), 70)

    def test_unused_value_lives_at_its_entry(self):
        self.assertEqual(peak_of_values([10, 20], [[], []]), 20)

    def test_no_entries(self):
        self.assertEqual(peak_of_values([], []), 0)

    @given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.data())
    def test_bounds(self, fresh, data):
        uses = [
            data.draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else []
            for i in range(len(fresh))
        ]
        least = peak_of_values(fresh, [[] for _ in fresh])
        most = peak_of_values(fresh, [*uses[:-1], list(range(len(fresh)))])
        self.assertEqual((least, most), (max(fresh), sum(fresh)))
        self.assertTrue(least <= peak_of_values(fresh, uses) <= most)


class TestGraphs(TestCase):
    def test_inputs_are_not_counted_and_outputs_live_to_the_end(self):
        def program(x):
            first = x + 1
            return first, (x * 2).relu()

        self.assertEqual(peak(program, [256]), 3 * KB)  # first, the product and its relu

    def test_a_small_result_keeps_no_large_one_alive(self):
        def program(q):  # 16 KiB of attention, 1 KiB of sums
            mixed, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
            return mixed.sum() + (q * 2).sum(), sums

        self.assertEqual(peak(program, [1, 4, 64, 16]), 17 * KB + 8)

    def test_updates_of_inputs_are_made_in_their_memory(self):
        def program(x, y):
            new_x, new_y = (x + 1).view(16, 16), y * 2
            return aten.copy_(x, new_x.view(256)), aten.copy_(y, new_y)

        self.assertEqual(peak(program, [256], [256]), 0)

    def test_views_are_their_base(self):
        def program(x):
            view = (x + 1).view(16, 16).t()
            y = x * 2
            return y + view.reshape(256)  # a copy, because the view is transposed

        # The sum lives through its views until the copy; then the copy, y and the result.
        self.assertEqual(peak(program, [256]), 3 * KB)

    def test_a_view_keeps_its_base_alive(self):
        def program(x):
            return (x + 1)[:1], (x * 2).sum()

        self.assertEqual(peak(program, [256]), 2 * KB + 4)

    def test_in_place_results_are_no_new_memory(self):
        self.assertEqual(peak(lambda x: aten.relu_(aten.add_(x + 1, 1)), [256]), KB)

    def test_outputs_of_one_node_add_up(self):
        self.assertEqual(peak(lambda x: aten.sort(x)[0], [256]), KB + 2 * KB)

    def test_a_launch_reads_its_input_until_its_wait(self):
        def program(x):
            launch = c10d.all_reduce(x + 1, "sum", "0")
            y = (x * 2).sum()
            return c10d.wait_tensor(launch), y

        # Input and result of the reduction are alive beside the product and its sum.
        self.assertEqual(peak(program, [256]), 3 * KB + 4)

    def test_a_launch_without_a_wait_reads_to_the_end(self):
        def program(x):
            c10d.all_reduce(x + 1, "sum", "0")
            return (x * 2).sum()

        # The result dies at once, the input stays.
        self.assertEqual(peak(program, [256]), 2 * KB + 4)

    def test_symbolic_sizes_by_their_hint(self):
        self.assertEqual(peak(torch.neg, [256], dynamic=True), KB)


if __name__ == "__main__":
    run_tests()
