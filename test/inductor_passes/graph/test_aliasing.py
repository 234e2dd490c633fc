import operator

import torch
from torch import fx
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.graph.aliasing import alias_source, is_view, mutated_inputs
from inductor_passes.testing import trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def sharing(graph):
    """``name -> whose memory`` for every call of a graph; ``*`` marks a view."""
    lines = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = alias_source(node)
        lines.append(f"{node.name}{'*' * is_view(node)} -> {source.name if source else 'fresh'}")
    return "\n".join(lines)


class TestAliasing(TestCase):
    def test_views_of_views(self):
        def views(x):
            left, right = aten.split.Tensor(aten.view(x, [4, 2]), 2)
            return left.t() + right.expand(2, 2), aten._unsafe_view(x, [2, 4])

        self.assertExpectedInline(
            sharing(trace(views, [8])),
            """\
view* -> x_1
split* -> view
getitem* -> split
getitem_1* -> split
t* -> getitem
expand* -> getitem_1
add -> fresh
_unsafe_view* -> x_1""",
        )

    def test_results_of_several_output_ops_are_parts_of_it(self):
        self.assertExpectedInline(
            sharing(trace(lambda x: aten.var_mean.correction(x, [1]), [8, 8])),
            """\
var_mean -> fresh
getitem -> var_mean
getitem_1 -> var_mean""",
        )

    def test_a_small_result_beside_a_large_one_has_memory_of_its_own(self):
        def attention(q):
            return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)

        self.assertExpectedInline(
            sharing(trace(attention, [1, 2, 8, 16])),
            """\
_scaled_dot_product_flash_attention_for_cpu -> fresh
getitem -> _scaled_dot_product_flash_attention_for_cpu
getitem_1 -> fresh""",
        )

    def test_in_place_results_are_their_input(self):
        graph = trace(lambda x, y: aten.copy_(aten.add_(x, 1), y), [8], [8])
        self.assertExpectedInline(
            sharing(graph),
            """\
add_ -> x_1
copy_ -> add_""",
        )
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self.assertEqual([node.name for node in mutated_inputs(calls[0])], ["x_1"])

    def test_out_argument(self):
        graph = fx.Graph()
        shard, out = graph.placeholder("shard"), graph.placeholder("out")
        launch = graph.call_function(
            c10d.all_gather_into_tensor_out.default, (shard, 8, "0"), {"out": out}
        )
        self.assertIs(alias_source(launch), out)
        self.assertEqual(mutated_inputs(launch), [out])

    def test_waits_are_their_launch(self):
        def both(x, y):
            coalesced = c10d.all_reduce_coalesced([x, y], "sum", "0")
            return [c10d.wait_tensor(t) for t in coalesced]

        self.assertExpectedInline(
            sharing(trace(both, [8], [8])),
            """\
all_reduce_coalesced -> fresh
getitem -> all_reduce_coalesced
getitem_1 -> all_reduce_coalesced
wait_tensor -> getitem
wait_tensor_1 -> getitem_1""",
        )

    def test_in_place_coalesced_launch_shares_with_each_input(self):
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        launch = graph.call_function(c10d.all_reduce_coalesced_.default, ([x, y], "sum", "0"))
        parts = [graph.call_function(operator.getitem, (launch, i)) for i in range(2)]
        self.assertEqual([alias_source(part) for part in parts], [x, y])

    def test_inputs_share_with_nobody(self):
        graph = trace(lambda x: x + 1, [8])
        first = next(iter(graph.nodes))
        self.assertIsNone(alias_source(first))
        self.assertFalse(is_view(first))


if __name__ == "__main__":
    run_tests()
