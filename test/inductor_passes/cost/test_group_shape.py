import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.cost.collectives import GroupShape, shape_of, shape_of_ranks
from inductor_passes.graph.collectives import launches
from inductor_passes.testing import fake_group, trace

c10d = torch.ops._c10d_functional


class TestShapeOfRanks(TestCase):
    def test_consecutive_ranks_share_a_node(self):
        self.assertEqual(shape_of_ranks(range(8), 8, 64), GroupShape(8, 1))
        self.assertEqual(shape_of_ranks(range(8, 16), 8, 64), GroupShape(8, 1))
        self.assertEqual(shape_of_ranks([6, 7], 8, 64), GroupShape(2, 1))

    def test_a_stride_of_a_node_puts_each_rank_on_its_own(self):
        shape = shape_of_ranks(range(3, 64, 8), 8, 64)
        self.assertEqual((shape, shape.ranks_per_node), (GroupShape(8, 8), 1))

    def test_whole_world(self):
        shape = shape_of_ranks(range(64), 8, 64)
        self.assertEqual((shape, shape.ranks_per_node), (GroupShape(64, 8), 8))

    def test_irregular_distances(self):
        # A flattened pair of mesh dimensions around a third: {0, 1, 4, 5} beside {2, 3, 6, 7}.
        self.assertEqual(shape_of_ranks([2, 3, 6, 7], 4, 8), GroupShape(4, 2))
        self.assertEqual(shape_of_ranks([0, 1, 4, 5], 4, 8), GroupShape(4, 2))

    def test_groups_that_do_not_tile_a_node_cost_as_the_worst(self):
        self.assertEqual(shape_of_ranks([0, 1, 2], 8, 24), GroupShape(3, 2))
        self.assertEqual(shape_of_ranks([6, 7, 8], 8, 24), GroupShape(3, 2))

    def test_a_world_of_one_node_has_no_boundary_to_straddle(self):
        self.assertEqual(shape_of_ranks([3, 4, 5], 8, 6), GroupShape(3, 1))

    @given(
        inner=st.integers(1, 8),
        size=st.integers(1, 8),
        outer=st.integers(1, 4),
        node=st.integers(1, 9),
    )
    def test_all_groups_of_a_mesh_dimension_have_one_shape(self, inner, size, outer, node):
        world = outer * size * inner
        mesh = torch.arange(world).view(outer, size, inner)
        shapes = {
            shape_of_ranks(mesh[o, :, i].tolist(), node, world)
            for o in range(outer)
            for i in range(inner)
        }
        self.assertEqual(len(shapes), 1)


def reduced(group_name):
    return lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", group_name))


class TestShapeOfLaunch(TestCase):
    def shape(self, graph):
        (launch,) = launches(graph)
        return shape_of(launch, 8)

    def test_registered_group_is_looked_up(self):
        with fake_group(world_size=32, rank=9):
            columns = dist.new_group(list(range(1, 32, 8)))
            graph = trace(reduced(columns.group_name), [4])
            self.assertEqual(self.shape(graph), GroupShape(4, 4))

    def test_unknown_group_is_taken_as_contiguous(self):
        graph = trace(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 16, "gone")), [4])
        self.assertEqual(self.shape(graph), GroupShape(16, 2))

    def test_unknown_group_without_a_size_is_one_node(self):
        self.assertEqual(self.shape(trace(reduced("gone"), [4])), GroupShape(8, 1))

    def test_group_that_is_a_graph_input(self):
        with fake_group(world_size=32):
            graph = trace(reduced("gone"), [4])
            (launch,) = launches(graph)
            with graph.inserting_before(launch):
                group = graph.placeholder("group")
            group.meta["val"] = dist.group.WORLD
            launch.args = (*launch.args[:2], group)
            self.assertEqual(self.shape(graph), GroupShape(32, 4))


if __name__ == "__main__":
    run_tests()
