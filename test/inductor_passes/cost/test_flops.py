import torch
from torch import fx
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.flop_counter import register_flop_formula

from inductor_passes.cost.compute import flops
from inductor_passes.testing import trace

aten = torch.ops.aten


def total(fn, *shapes, **options):
    return sum(flops(node) for node in trace(fn, *shapes, **options).nodes)


class TestMatrixProducts(TestCase):
    def test_two_operations_per_multiply_add(self):
        self.assertEqual(total(torch.mm, [3, 5], [5, 7]), 2 * 3 * 5 * 7)
        self.assertEqual(total(torch.addmm, [7], [3, 5], [5, 7]), 2 * 3 * 5 * 7)
        self.assertEqual(total(torch.bmm, [2, 3, 5], [2, 5, 7]), 2 * 2 * 3 * 5 * 7)
        self.assertEqual(total(torch.baddbmm, [2, 3, 7], [2, 3, 5], [2, 5, 7]), 2 * 2 * 3 * 5 * 7)
        self.assertEqual(total(aten.mv, [3, 5], [5]), 2 * 3 * 5)
        self.assertEqual(total(aten.dot, [5], [5]), 2 * 5)
        self.assertEqual(total(aten._int_mm, [32, 16], [16, 8], dtype=torch.int8), 2 * 32 * 16 * 8)

    def test_symbolic_sizes_count_by_their_hint(self):
        self.assertEqual(total(torch.mm, [3, 5], [5, 7], dynamic=True), 2 * 3 * 5 * 7)

    def test_other_work_is_free(self):
        self.assertEqual(total(lambda x: torch.softmax(x, -1).sum(), [4, 4]), 0)

    def test_grouped_products(self):
        graph = fx.Graph()
        operands = {
            "rows": ([96, 16], [4, 16, 32], 2 * 96 * 16 * 32),
            "batch": ([4, 8, 16], [4, 16, 32], 2 * 4 * 8 * 16 * 32),
            "inner": ([64, 96], [96, 32], 2 * 64 * 96 * 32),
        }
        for name, (a, b, expected) in operands.items():
            inputs = []
            for side, shape in (("a", a), ("b", b)):
                inputs.append(graph.placeholder(f"{name}_{side}"))
                inputs[-1].meta["val"] = torch.empty(shape, device="meta")
            node = graph.call_function(aten._grouped_mm.default, tuple(inputs))
            node.meta["val"] = None
            with self.subTest(name):
                self.assertEqual(flops(node), expected)

    def test_scaled_product(self):
        def scaled(a, b, scale):
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)

        self.assertEqual(total(scaled, [32, 64], [16, 64], [1], device="cuda"), 2 * 32 * 64 * 16)


class TestConvolutions(TestCase):
    """Forward: 2 x batch x output positions x elements of the weight. Each gradient costs the
    same.
    """

    def gradients(self, transposed=False, groups=1):
        def forward(x, weight):
            stride, pad = [2, 2], [1, 1]
            return aten.convolution(
                x, weight, None, stride, pad, [1, 1], transposed, [0, 0], groups
            )

        def backward(x, weight):
            out = forward(x, weight)
            return aten.convolution_backward(
                torch.ones_like(out), x, weight, None, [2, 2], [1, 1], [1, 1],
                transposed, [0, 0], groups, [True, True, False],
            )[:2]  # fmt: skip

        x, weight = [2, 8, 10, 10], [16, 8 // groups, 3, 3]
        if transposed:
            weight = [8, 16 // groups, 3, 3]
        return total(forward, x, weight), total(backward, x, weight), weight

    def test_dense(self):
        forward, both, weight = self.gradients()
        self.assertEqual(forward, 2 * 2 * 5 * 5 * torch.Size(weight).numel())
        self.assertEqual(both, 3 * forward)

    def test_groups_divide_both_gradients(self):
        forward, both, weight = self.gradients(groups=4)
        self.assertEqual(forward, 2 * 2 * 5 * 5 * torch.Size(weight).numel())
        self.assertEqual(both, 3 * forward)

    def test_transposed_counts_input_positions(self):
        forward, both, weight = self.gradients(transposed=True)
        self.assertEqual(forward, 2 * 2 * 10 * 10 * torch.Size(weight).numel())
        self.assertEqual(both, 3 * forward)


class TestAttention(TestCase):
    BATCH, HEADS, ROWS, COLUMNS, SIZE = 2, 4, 16, 32, 8
    SHAPES = ([2, 4, 16, 8], [2, 4, 32, 8], [2, 4, 32, 8])
    FORWARD = 2 * 2 * (2 * 4) * 16 * 32 * 8  # two products of 2 operations per score and feature

    def test_gpu_kernels(self):
        flash = aten._scaled_dot_product_flash_attention
        efficient = aten._scaled_dot_product_efficient_attention
        options = {"device": "cuda", "dtype": torch.float16}
        self.assertEqual(
            total(lambda q, k, v: flash(q, k, v)[0], *self.SHAPES, **options), self.FORWARD
        )
        self.assertEqual(
            total(lambda q, k, v: efficient(q, k, v, None, False)[0], *self.SHAPES, **options),
            self.FORWARD,
        )

    def test_cpu_kernel_forward_and_backward(self):
        def step(q, k, v):
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            out, logsumexp = kernel(q, k, v)
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return backward(torch.ones_like(out), q, k, v, out, logsumexp, 0.0, False)

        # Backward recomputes the scores and has four more products.
        self.assertEqual(total(step, *self.SHAPES), self.FORWARD + 5 * self.FORWARD // 2)

    def test_causal_kernels_skip_half(self):
        square = [[2, 4, 16, 8]] * 3

        def attend(causal):
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            return lambda q, k, v: kernel(q, k, v, 0.0, causal)[0]

        full, causal = total(attend(False), *square), total(attend(True), *square)
        self.assertEqual(causal, full * (16 * 17 / 2) / (16 * 16))


class TestFormulas(TestCase):
    def test_a_users_formula_counts(self):
        @torch.library.custom_op("cost_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        register_flop_formula(torch.ops.cost_test.twice)(lambda shape, **_: 7 * shape[0])
        self.assertEqual(total(torch.ops.cost_test.twice, [6]), 42)

    def test_a_formula_that_fails_counts_nothing(self):
        @torch.library.custom_op("cost_test::odd", mutates_args=())
        def odd(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        odd.register_fake(torch.empty_like)
        register_flop_formula(torch.ops.cost_test.odd)(lambda shape, **_: 1 // 0)
        with self.assertLogs("inductor_passes.cost.compute", "WARNING") as logs:
            self.assertEqual(total(torch.ops.cost_test.odd, [6]), 0)
            self.assertEqual(total(torch.ops.cost_test.odd, [8]), 0)
        (said,) = logs.output
        self.assertIn("cost_test.odd.default raised ZeroDivisionError", said)


if __name__ == "__main__":
    run_tests()
