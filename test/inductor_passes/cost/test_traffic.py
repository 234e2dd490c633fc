import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.cost.compute import graph_traffic
from inductor_passes.graph.node_kinds import distinct_bytes
from inductor_passes.testing import trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
N = 1024  # float32 elements: 4 KiB


def traffic(fn, *shapes, **options):
    """``name: bytes read + bytes written``, ``kernel`` where one starts; nodes that do nothing
    left out.
    """
    lines = []
    for node, moved in graph_traffic(trace(fn, *shapes, **options)).items():
        if moved.read_bytes or moved.write_bytes or moved.starts_kernel:
            kernel = " kernel" if moved.starts_kernel else ""
            lines.append(f"{node.name}: {moved.read_bytes:g} + {moved.write_bytes:g}{kernel}")
    return "\n".join(lines)


class TestOneNode(TestCase):
    def test_product_reads_operands_and_writes_its_result(self):
        self.assertExpectedInline(traffic(torch.mm, [16, 32], [32, 8]), """mm: 3072 + 512 kernel""")

    def test_operand_used_twice_is_read_once(self):
        self.assertExpectedInline(traffic(lambda x: x @ x, [16, 16]), """mm: 1024 + 1024 kernel""")
        self.assertExpectedInline(
            traffic(lambda x: x @ x.t(), [16, 16]), """mm: 1024 + 1024 kernel"""
        )

    def test_broadcast_operand_is_read_by_its_elements(self):
        self.assertExpectedInline(
            traffic(lambda x, b: x @ b.expand(16, 16), [16, 16], [16]), """mm: 1088 + 1024 kernel"""
        )

    def test_slice_reads_what_it_takes(self):
        self.assertExpectedInline(
            traffic(lambda x: x[:4] @ x[:4].t(), [64, 16]), """mm: 512 + 64 kernel"""
        )

    def test_embedding_reads_the_rows_it_picks(self):
        def embed(table, x):
            return aten.embedding(table, x.long())

        self.assertExpectedInline(
            traffic(embed, [50000, 64], [10]),
            """\
_to_copy: 40 + 80 kernel
embedding: 2640 + 2560 kernel""",
        )

    def test_several_outputs(self):
        self.assertExpectedInline(
            traffic(lambda x: aten.sort(x), [N]), """sort: 4096 + 12288 kernel"""
        )

    def test_in_place_writes_its_input(self):
        self.assertExpectedInline(
            traffic(lambda x, y: aten.add_(x, y), [N], [N]), """add_: 8192 + 4096 kernel"""
        )

    def test_copy_does_not_read_what_it_overwrites(self):
        self.assertExpectedInline(
            traffic(lambda x, y: aten.copy_(x, y), [N], [N]), """copy_: 4096 + 4096 kernel"""
        )

    def test_element_size(self):
        self.assertExpectedInline(
            traffic(torch.neg, [N], dtype=torch.bfloat16), """neg: 2048 + 2048 kernel"""
        )

    def test_symbolic_sizes_by_their_hint(self):
        self.assertExpectedInline(
            traffic(torch.neg, [N], dynamic=True), """neg: 4096 + 4096 kernel"""
        )

    def test_uninitialised_memory_is_free(self):
        self.assertExpectedInline(traffic(lambda x: torch.empty_like(x), [N]), """""")


class TestFusion(TestCase):
    def test_chain_is_one_kernel(self):
        self.assertExpectedInline(
            traffic(lambda x: ((x + 1) * 2).relu(), [N]),
            """\
add: 4096 + 0
relu: 0 + 4096 kernel""",
        )

    def test_value_needed_elsewhere_is_written_once(self):
        def forked(x):
            y = x + 1
            return y * 2, y

        self.assertExpectedInline(
            traffic(forked, [N]),
            """\
add: 4096 + 4096 kernel
mul: 0 + 4096 kernel""",
        )

    def test_rms_norm_after_a_residual_is_one_kernel(self):
        def norm(x, weight, y):
            h = x + y
            scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
            return h * scale * weight, h

        self.assertExpectedInline(
            traffic(norm, [64, N], [N], [64, N]),
            """\
add: 524288 + 262144 kernel
mul_1: 4096 + 262144 kernel""",
        )

    def test_short_reduction_fuses_and_a_long_one_ends_its_kernel(self):
        def scaled(x):
            return x / x.abs().amax()

        self.assertExpectedInline(
            traffic(scaled, [N]),
            """\
abs_1: 2048 + 0
div: 2048 + 4096 kernel""",
        )
        self.assertExpectedInline(
            traffic(scaled, [16 * N]),
            """\
abs_1: 65536 + 0
amax: 0 + 4 kernel
div: 65540 + 65536 kernel""",
        )

    def test_no_kernel_spans_a_product(self):
        def around(x):
            y = x + 1
            return y + y @ y

        self.assertExpectedInline(
            traffic(around, [16, 16]),
            """\
add: 1024 + 1024 kernel
mm: 1024 + 1024 kernel
add_1: 2048 + 1024 kernel""",
        )

    def test_no_kernel_spans_a_wait(self):
        def around(x):
            y = x + 1
            return y + c10d.wait_tensor(c10d.all_reduce(y, "sum", "0"))

        self.assertExpectedInline(
            traffic(around, [N]),
            """\
add: 4096 + 4096 kernel
add_1: 8192 + 4096 kernel""",
        )

    def test_parts_of_a_concatenation_are_computed_in_place(self):
        self.assertExpectedInline(
            traffic(lambda x, y: torch.cat([x + 1, y]), [N], [N]),
            """\
add: 4096 + 0
cat: 4096 + 8192 kernel""",
        )

    def test_partly_read_value_is_written(self):
        self.assertExpectedInline(
            traffic(lambda x: (x + 1)[: N // 2] * 2, [N]),
            """\
add: 4096 + 4096 kernel
mul: 2048 + 2048 kernel""",
        )

    def test_readers_in_one_kernel_share_a_read(self):
        self.assertExpectedInline(
            traffic(lambda x: (x + 1, x * 2), [N]),
            """\
add: 2048 + 4096 kernel
mul: 2048 + 4096 kernel""",
        )

    def test_readers_behind_a_view_share_it_too(self):
        def program(x):
            flat = (x @ x).view(-1)
            return flat + 1, flat * 2

        self.assertExpectedInline(
            traffic(program, [16, 16]),
            """\
mm: 1024 + 1024 kernel
add: 512 + 1024 kernel
mul: 512 + 1024 kernel""",
        )

    def test_what_an_input_becomes_is_computed_in_its_memory(self):
        def update(parameter, gradient):
            parameter.copy_(parameter - gradient * 0.1)

        self.assertExpectedInline(
            traffic(update, [N], [N]),
            """\
mul: 4096 + 0
sub: 4096 + 4096 kernel""",
        )

    def test_a_product_is_copied_into_an_input(self):
        self.assertExpectedInline(
            traffic(lambda x, y: x.copy_(y @ y), [16, 16], [16, 16]),
            """\
mm: 1024 + 1024 kernel
copy_: 1024 + 1024 kernel""",
        )

    def test_order_of_the_nodes_makes_no_difference(self):
        graph = trace(lambda x, w: ((x + 1) @ w, (x * 2) @ w, x.sum(-1)), [16, 16], [16, 16])
        before = graph_traffic(graph)
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        nodes[0].prepend(nodes[-1])  # the sum, now first
        self.assertEqual(graph_traffic(graph), before)


class TestDistinctBytes(TestCase):
    def test_repeated_dimensions_count_once(self):
        self.assertEqual(distinct_bytes(torch.empty(4, 1).expand(4, 8)), 16)
        self.assertEqual(distinct_bytes(torch.empty(4, 8).t()), 128)
        self.assertEqual(distinct_bytes(torch.empty(0, 8)), 0)


if __name__ == "__main__":
    run_tests()
