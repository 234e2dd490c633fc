"""Equal graphs of ranks of a mesh are written the same, and share a key unless something may ask
for the rank.
"""

import pytest
import torch
from torch import fx
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import registry
from inductor_passes.cost import default_topology, load_topology
from inductor_passes.cost.model import digest_of
from inductor_passes.inductor.cache_keys import is_rank_free, name_groups_alike
from inductor_passes.inductor.hooks import Attachment
from inductor_passes.inductor.options import options
from inductor_passes.pass_options import PassOptions
from inductor_passes.report.recorder import records_of_block
from inductor_passes.testing import fake_group, trace
from inductor_passes.torch_compat import c10d


def on_rank(rank, function):
    with fake_group(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return function(mesh)


def written(mesh, group=None):
    name = mesh.get_group("tp").group_name
    graph = trace(lambda x: all_reduce(x, "sum", name) * 2, (4,))
    gm = fx.GraphModule({}, graph)
    name_groups_alike(gm)
    return [str(node.args) for node in gm.graph.nodes]


def test_ranks_write_equal_graphs_of_a_mesh_dimension_alike():
    own = [on_rank(rank, lambda mesh: mesh.get_group("tp").group_name) for rank in range(4)]
    assert len(set(own)) > 1
    assert len({tuple(on_rank(rank, written)) for rank in range(4)}) == 1


def test_a_name_stands_for_the_group_of_this_rank():
    def ranks(mesh):
        own = mesh.get_group("tp").group_name
        common = c10d.common_name(own)
        assert c10d.own_name(common) == own
        return c10d.group_ranks(common)

    assert [on_rank(rank, ranks) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_each_mesh_dimension_names_its_group():
    def names(mesh):
        found = [c10d.common_name(mesh.get_group(dim).group_name) for dim in ("dp", "tp")]
        default = torch.distributed.group.WORLD.group_name
        assert c10d.common_name(default) == default
        return found

    dp, tp = on_rank(3, names)
    assert dp != tp


def test_a_group_made_later_is_not_taken_for_one_that_is_gone():
    def names(mesh):
        first = torch.distributed.new_group([0, 1, 2, 3])
        one = c10d.common_name(first.group_name)
        torch.distributed.destroy_process_group(first)
        second = torch.distributed.new_group([0, 1, 2, 3])
        return one, c10d.common_name(second.group_name)

    one, other = on_rank(1, names)
    assert one != other


def test_what_is_no_group_keeps_its_name():
    def names(mesh):
        return c10d.common_name("nobody's")

    assert on_rank(0, names) == c10d.common_name("nobody's") == "nobody's"


def test_figures_of_a_topology_are_the_same_on_all_ranks():
    topology = load_topology(default_topology("cpu"))
    assert len({on_rank(rank, lambda mesh: digest_of(topology)) for rank in range(4)}) == 1


def graph_of(function, *shapes):
    return fx.GraphModule({}, trace(function, *shapes))


def test_a_graph_is_rank_free_and_one_with_a_users_pass_is_not():
    gm = graph_of(lambda x: x * 2, (4,))
    assert is_rank_free(gm, options())
    assert not is_rank_free(gm, options({"post_grad_custom_post_pass": lambda graph: None}))
    assert not is_rank_free(gm, {"_pre_fusion_custom_pass": lambda nodes: nodes})


def test_a_pass_of_others_may_ask_for_the_rank(monkeypatch):
    class Theirs(inductor_passes.GraphPass):
        name = "theirs"

        def run(self, context):
            pass

    given = options()
    monkeypatch.setattr(registry, "ordered_passes", lambda: [*registry.CORE_PASSES, Theirs()])
    assert not is_rank_free(graph_of(lambda x: x * 2, (4,)), given)


@pytest.mark.parametrize(("function", "free"), [("linear", False), ("split", True)])
def test_cuts_that_dtensor_makes_are_looked_for_by_position(function, free):
    gm = graph_of(lambda x: x.split(2)[1], (4,))
    cut = next(node for node in gm.graph.nodes if "split" in str(node.target))
    cut.meta["source_fn_stack"] = [("cut", function)]
    assert is_rank_free(gm, options()) is free


def test_a_report_calls_a_group_as_this_process_does():
    def reported(mesh):
        gm = fx.GraphModule(
            {}, trace(lambda x: all_reduce(x, "sum", mesh.get_group("tp").group_name) * 2, (4,))
        )
        name_groups_alike(gm)
        with records_of_block() as records:
            Attachment(PassOptions()).improve(gm.graph, "inference", lowers=False)
        (record,) = records
        lanes = {span.lane for span in record.after.spans} - {"compute"}
        return {each.group_name for each in record.collectives} | lanes, mesh.get_group(
            "tp"
        ).group_name

    for rank in range(4):
        found, own = on_rank(rank, reported)
        assert found == {own} or found == {own, f"group {own}"}
