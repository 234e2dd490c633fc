import copy
import dataclasses
import functools
import pickle

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.cost import CostModel, TopologyCostModel, load_topology
from inductor_passes.cost.topology import LinkProtocol, MatmulRate
from inductor_passes.graph.collectives import launches
from inductor_passes.testing import fake_group, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# 1 TFLOPS reached, 100 GB/s, 2 us a kernel: 1e6 operations or 1e5 bytes a microsecond.
SIMPLE = dataclasses.replace(
    load_topology("cpu-gloo"),
    ranks_per_node=8,
    matmul=(("float32", MatmulRate(2.0, 0.5)), ("bfloat16", MatmulRate(8.0, 0.5))),
    attention_efficiency=0.25,
    memory_gb_per_s=100.0,
    kernel_us=2.0,
    intra_gb_per_s=1.0,
    inter_gb_per_s=0.1,
    protocols=(LinkProtocol("only", 5.0, 1.0, 1.0, 3.0, 1.0),),
    all_reduce_in_node=None,
    reduce_scatter_rounds=1.0,
)


def times(fn, *shapes, topology=SIMPLE, **options):
    cost = TopologyCostModel(topology)
    return {node.name: cost.compute_us(node) for node in trace(fn, *shapes, **options).nodes}


def collective(fn, *shapes, **options):
    graph = trace(fn, *shapes, **options)
    (node,) = launches(graph) or [n for n in graph.nodes if "alltoall" in n.name]
    return TopologyCostModel(SIMPLE).launch_us(node)


class TestCompute(TestCase):
    def test_large_product_is_bound_by_arithmetic(self):
        self.assertEqual(times(torch.mm, [512, 512], [512, 512])["mm"], 2 * 512**3 / 1e6 + 2)

    def test_small_dtype_is_faster(self):
        us = times(torch.mm, [512, 512], [512, 512], dtype=torch.bfloat16)["mm"]
        self.assertEqual(us, 2 * 512**3 / 4e6 + 2)

    def test_thin_product_is_bound_by_memory(self):
        us = times(torch.mm, [1, 512], [512, 512])["mm"]
        self.assertEqual(us, (512 + 512 * 512 + 512) * 4 / 1e5 + 2)

    def test_attention_has_its_own_efficiency(self):
        def attend(q, k, v):
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

        us = times(attend, *[[1, 1, 512, 64]] * 3)
        operations = 4 * 512 * 512 * 64
        name = "_scaled_dot_product_flash_attention_for_cpu"
        self.assertEqual(us[name], operations / (2.0 * 0.25 * 1e6) + 2)

    def test_a_fused_chain_starts_one_kernel(self):
        us = times(lambda x: (x + 1).relu(), [100_000])
        self.assertEqual(us["add"], 4.0)
        self.assertEqual(us["relu"], 4.0 + 2)

    def test_what_takes_no_compute_time(self):
        def program(x):
            gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, "0"))
            return gathered.view(-1).t()

        self.assertEqual(set(times(program, [100_000]).values()), {0.0})

    def test_blocking_collective_computes_nothing(self):
        with fake_group():
            us = times(lambda x: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, "0"), [8, 64])
        self.assertEqual(us["shard_dim_alltoall"], 0.0)

    def test_custom_op_costs_its_traffic(self):
        @torch.library.custom_op("cost_test::opaque", mutates_args=())
        def opaque(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        opaque.register_fake(torch.empty_like)
        self.assertEqual(times(torch.ops.cost_test.opaque, [100_000])["opaque"], 8.0 + 2)

    def test_answers_follow_a_changed_graph(self):
        graph = trace(lambda x: (x + 1).relu(), [100_000])
        cost = TopologyCostModel(SIMPLE)
        _, add, relu, output = graph.nodes
        self.assertEqual(cost.compute_us(add), 4.0)
        output.args = ((add, relu),)  # now the sum is needed as well: it has to be written
        self.assertEqual(cost.compute_us(add), 8.0 + 2)

    def test_one_model_for_several_graphs(self):
        cost = TopologyCostModel(SIMPLE)
        one, two = trace(torch.neg, [100_000]), trace(torch.neg, [200_000])
        for _ in range(2):
            self.assertEqual([cost.compute_us(n) for n in one.nodes], [0.0, 8.0 + 2, 0.0])
            self.assertEqual([cost.compute_us(n) for n in two.nodes], [0.0, 16.0 + 2, 0.0])


class TestLaunch(TestCase):
    def test_payload_is_this_ranks_input(self):
        def gather(x):
            return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, "0"))

        def scatter(x):
            return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 8, "0"))

        self.assertEqual(collective(gather, [1000]), 5 + 7 + 7 * 4)
        self.assertEqual(collective(scatter, [8000]), 5 + 7 + 7 * 4)

    def test_coalesced_collectives_run_in_turn_after_one_start(self):
        def reduce(x, y):
            return [c10d.wait_tensor(t) for t in c10d.all_reduce_coalesced([x, y], "sum", "0")]

        self.assertEqual(collective(reduce, [800], [800]), 2 * (5 + 14 + 2 * 7 / 8 * 3.2))
        (launch,) = launches(trace(reduce, [800], [800]))
        grouped = dataclasses.replace(SIMPLE, coalesced_start_share=1.0)
        self.assertEqual(
            TopologyCostModel(grouped).launch_us(launch), 5 + 2 * (14 + 2 * 7 / 8 * 3.2)
        )

    def test_size_and_stride_of_the_group_choose_the_link(self):
        def reduce(name):
            return lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", name))

        with fake_group(world_size=16):
            near = dist.new_group([0, 1]).group_name
            far = dist.new_group([0, 8]).group_name
            self.assertEqual(collective(reduce(near), [1000]), 5 + 2 + 4)
            self.assertEqual(collective(reduce(far), [1000]), 5 + 6 + 40)

    def test_every_rank_of_a_mesh_dimension_gets_one_answer(self):
        def reduced(name, x):
            return c10d.wait_tensor(c10d.all_reduce(x, "sum", name))

        answers = set()
        for rank in range(16):
            with fake_group(world_size=16, rank=rank):
                rows = [dist.new_group(list(range(r, r + 4))) for r in range(0, 16, 4)]
                name = rows[rank // 4].group_name
                cost = TopologyCostModel(SIMPLE)
                graph = trace(functools.partial(reduced, name), [1000])
                answers.add(cost.launch_us(launches(graph)[0]))
        self.assertEqual(len(answers), 1)

    def test_permutation_sends_to_one_peer(self):
        def exchange(splits):
            def program(x):
                return c10d.wait_tensor(c10d.all_to_all_single(x, splits, splits, "0"))

            return program

        self.assertEqual(collective(exchange([1000] * 8), [8000]), 5 + 1 + 7 * 4)
        self.assertEqual(collective(exchange([0, 8000, 0, 0, 0, 0, 0, 0]), [8000]), 5 + 1 + 32)

    def test_blocking_collective(self):
        with fake_group():
            us = collective(
                lambda x: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, "0"), [8, 2000]
            )
        self.assertEqual(us, 5 + 1 + 7 / 8 * 64)

    def test_other_nodes_have_no_link_time(self):
        graph = trace(torch.neg, [4])
        with self.assertRaisesRegex(ValueError, "neg.* is no collective"):
            TopologyCostModel(SIMPLE).launch_us(list(graph.nodes)[1])


class TestModel(TestCase):
    def test_is_a_cost_model(self):
        self.assertIsInstance(TopologyCostModel(SIMPLE), CostModel)
        self.assertEqual(TopologyCostModel(load_topology("h100x8")).name, "h100x8")

    def test_copies_leave_the_analysed_graph_behind(self):
        cost = TopologyCostModel(SIMPLE)
        node = list(trace(torch.neg, [1000]).nodes)[1]
        expected = cost.compute_us(node)
        for other in (copy.deepcopy(cost), pickle.loads(pickle.dumps(cost))):
            self.assertEqual((other.topology, other.compute_us(node)), (SIMPLE, expected))

    def test_symbolic_sizes_are_not_guarded(self):
        graph = trace(lambda x, w: torch.softmax(x @ w, -1), [64, 32], [32, 16], dynamic=True)
        cost = TopologyCostModel(SIMPLE)
        shapes = next(iter(graph.nodes)).meta["val"].shape[0].node.shape_env
        before = len(shapes.guards)
        self.assertTrue(all(cost.compute_us(node) >= 0 for node in graph.nodes))
        self.assertEqual(len(shapes.guards), before)

    def test_digest_changes_with_every_figure(self):
        seen = {TopologyCostModel(SIMPLE).digest()}
        for change in (
            {"ranks_per_node": 4},
            {"memory_gb_per_s": 2.0},
            {"inter_gb_per_s": 0.2},
            {"matmul": (("float32", MatmulRate(2.0, 0.6)),)},
            {"protocols": (LinkProtocol("only", 5.0, 1.0, 1.0, 3.0, 0.9),)},
        ):
            seen.add(TopologyCostModel(dataclasses.replace(SIMPLE, **change)).digest())
        self.assertEqual(len(seen), 6)

    def test_digest_is_stable_and_leaves_sources_out(self):
        other = dataclasses.replace(SIMPLE, sources=(("x", "elsewhere"),))
        self.assertEqual(TopologyCostModel(SIMPLE).digest(), TopologyCostModel(other).digest())

    def test_digest_tells_jobs_and_meshes_apart(self):
        def digest(world_size, rank, groups):
            with fake_group(world_size=world_size, rank=rank):
                for ranks in groups:
                    dist.new_group(ranks)
                return TopologyCostModel(SIMPLE).digest()

        rows = [[0, 1], [2, 3]], [[0, 8], [1, 9]]
        base = digest(16, 0, rows[0])
        self.assertNotEqual(base, digest(32, 0, rows[0]))
        self.assertNotEqual(base, digest(16, 0, rows[1]))


if __name__ == "__main__":
    run_tests()
