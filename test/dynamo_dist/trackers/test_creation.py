"""Groups and meshes made while tracing: the equal one of before, or a break with the fix."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dynamo_dist
from dynamo_dist.testing import fake_mesh
from dynamo_dist.trackers.creation import BREAK, MEMORY, group_key


@pytest.fixture(autouse=True)
def plugin():
    torch._dynamo.reset()
    with fake_mesh(8, names=("x",)) as mesh, dynamo_dist.enabled():
        yield mesh
    torch._dynamo.reset()


def compiled(fn):
    return torch.compile(fn, backend="eager", fullgraph=True)


X = torch.ones(4)


def sub_group(x):
    return x + dist.new_group([0, 1]).size(), dist.new_group(ranks=[1, 0])


def own_mesh(x):
    return x + init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).size(1)


def test_an_equal_group_of_before_is_used():
    eager, made = sub_group(X)
    got, group = compiled(sub_group)(X)
    assert torch.equal(got, eager)
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(made) == [0, 1]


def test_a_group_without_this_rank_is_what_eager_says():
    def fn(x):
        return x + (dist.new_group([4, 5]) == dist.GroupMember.NON_GROUP_MEMBER)

    expected = fn(X)
    assert torch.equal(expected, X + 1)
    assert torch.equal(compiled(fn)(X), expected)


def test_an_equal_mesh_of_before_is_used():
    assert torch.equal(own_mesh(X), compiled(own_mesh)(X))


def test_an_equal_unflattened_mesh_is_used(plugin):
    def fn(x, mesh):
        return x + mesh._unflatten(0, (2, 4), ("a", "b")).size(0)

    assert torch.equal(fn(X, plugin), compiled(fn)(X, plugin))


@pytest.mark.parametrize("program", [sub_group, own_mesh])
def test_without_an_equal_one_the_break_says_to_make_it_before(program):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=BREAK) as caught:
        compiled(program)(X)
    assert "above the compiled function, on all ranks" in str(caught.value)


def test_nothing_is_remembered_after_disable():
    sub_group(X)
    assert MEMORY.groups
    dynamo_dist.disable()
    assert not MEMORY.groups
    sub_group(X)
    assert not MEMORY.groups


def test_a_group_with_options_of_its_own_stands_for_itself():
    assert group_key({"ranks": [1, 0]}) == group_key({"ranks": (0, 1), "backend": None})
    assert group_key({"ranks": [0, 1]}) != group_key({"ranks": [0, 1], "backend": "gloo"})
    assert group_key({"ranks": [0, 1], "pg_options": object()}) is None


def test_a_mesh_as_context(plugin):
    from torch.distributed.device_mesh import _mesh_resources

    def fn(x, mesh):
        with mesh:
            inside = _mesh_resources.get_current_mesh().size()
        return x + inside + len(_mesh_resources.mesh_stack)

    assert torch.equal(fn(X, plugin), compiled(fn)(X, plugin))
    assert _mesh_resources.mesh_stack == []
