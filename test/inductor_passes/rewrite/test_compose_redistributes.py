import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from inductor_passes.pipeline import run_pass
from inductor_passes.rewrite import ComposeRedistributes
from inductor_passes.testing import dump, fake_group, trace

c10d = torch.ops._c10d_functional
alltoall = torch.ops._dtensor


def gather(x, dim=0, ranks=4):
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))
    return torch.cat(whole.chunk(ranks), dim) if dim else whole


@pytest.mark.parametrize("gather_dim", [0, 1, 2])
@pytest.mark.parametrize("shard_dim", [0, 1, 2])
def test_shard_to_shard(on_all_ranks, gather_dim, shard_dim):
    def program(rank, x):
        return gather(x, gather_dim).chunk(4, shard_dim)[rank] * 2

    record, graph, _ = on_all_ranks(ComposeRedistributes(), program, [4, 8, 4], dtensor=True)
    counter = "gathers_removed" if gather_dim == shard_dim else "gathers_to_all_to_all"
    assert record.counters[counter] == 1
    assert not any(n.target is c10d.all_gather_into_tensor.default for n in graph.nodes)


def test_graph(on_all_ranks):
    def program(rank, x):
        return gather(x).chunk(4, 1)[rank] * 2

    _, graph, _ = on_all_ranks(ComposeRedistributes(), program, [2, 8], dtensor=True)
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [2, 8]
reshape_default: [2, 4, 2] = reshape(arg0_1, [2, 4, 2])
permute_default: [4, 2, 2] = permute(reshape_default, [1, 0, 2])
clone_default: [4, 2, 2] = clone(permute_default, memory_format=torch.contiguous_format)
view_default: [8, 2] = view(clone_default, [8, 2])
all_to_all_single_default: [8, 2] = all_to_all_single(view_default, [2, 2, 2, 2], [2, 2, 2, 2], 0)
wait_tensor_default: [8, 2] = wait_tensor(all_to_all_single_default)
mul: [8, 2] = mul(wait_tensor_default, 2)
return mul""",
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda rank, x: gather(x).chunk(4)[0],  # no DTensor says that each rank takes its own
        lambda rank, x: (lambda y: (y.chunk(4)[rank], y + 1))(gather(x)),
        lambda rank, x: gather(x).chunk(2)[0],
    ],
)
def test_left_alone(on_all_ranks, program):
    record, _, _ = on_all_ranks(ComposeRedistributes(), program, [2, 8])
    assert not record.changed


def test_two_mesh_dimensions_of_one_size_could_be_confused():
    """On a 2 x 2 mesh, rank 0 cannot tell a chunk by one dimension from a chunk by the other."""

    def program(x):
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, NAME))
        return whole.chunk(2)[0] * 2

    with fake_group(4, 0):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
        NAME = groups[0].group_name
        graph = trace(program, [2, 8])
        for node in graph.nodes:
            node.meta["source_fn_stack"] = [("redistribute", "redistribute")]
        assert not run_pass(ComposeRedistributes(), graph).changed


@pytest.mark.parametrize(
    ("first", "second", "left"), [((0, 1), (1, 0), 0), ((0, 1), (1, 2), 1), ((0, 1), (2, 0), 2)]
)
def test_dimensions_exchanged_twice(on_all_ranks, first, second, left):
    def program(rank, x):
        y = alltoall.shard_dim_alltoall(x, *first, "0")
        return alltoall.shard_dim_alltoall(y, *second, "0") * 2

    _, graph, _ = on_all_ranks(ComposeRedistributes(), program, [4, 4, 4])
    assert sum("alltoall" in str(node.target) for node in graph.nodes) == left
