"""Groups and meshes made while tracing: the equal one of before, or a break with the fix."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dynamo_dist
from dynamo_dist.testing import fake_mesh
from dynamo_dist.tracing.creation import BREAK, MEMORY, group_key


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


def constructed(x):
    mesh = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp"))
    return x + mesh.size(1)


def test_an_equal_mesh_of_before_is_used_by_the_constructor():
    expected = constructed(X)
    assert torch.equal(compiled(constructed)(X), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: DeviceMesh("cpu", [0, 1, 2, 3]),
        lambda x: DeviceMesh("cpu", torch.arange(4)),
        lambda x: DeviceMesh("cpu", [[0, 1], [2]]),
    ],
)
def test_without_an_equal_one_the_constructor_breaks(make):
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="Create it above the compiled function"
    ):
        compiled(lambda x: x + make(x).ndim)(X)


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


@pytest.fixture
def cube(plugin):
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def local(x, mesh):
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(x, mesh, placements, run_check=False) * 2


def flat(x, mesh):
    return local(x, mesh["dp", "tp"]._flatten("both"))


def concatenated(x, mesh):
    return local(x, DeviceMesh._concatenate([mesh["pp"], mesh["tp"]]))


@pytest.mark.parametrize("program", [flat, concatenated])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_derived_mesh_carries_a_dtensor(cube, program, backend):
    expected = program(X, cube)
    function = torch.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):
        found = function(X, cube)
        assert found.device_mesh == expected.device_mesh
        assert torch.equal(found.to_local(), expected.to_local())


def test_a_flattened_mesh_that_nobody_made_breaks(cube):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=BREAK):
        compiled(flat)(X, cube)


def test_a_mesh_of_one_dimension_is_its_own_flattened_mesh(cube):
    assert torch.equal(compiled(lambda x, m: x + m["tp"]._flatten().size())(X, cube), X + 2)


def test_overlapping_meshes_raise_what_eager_raises(cube):
    def fn(x, mesh):
        try:
            return x + DeviceMesh._concatenate([mesh["tp"], mesh["tp"]]).ndim
        except RuntimeError:
            return x - 1

    assert torch.equal(compiled(fn)(X, cube), fn(X, cube))


def test_a_mesh_of_other_dimensions_concatenates_anew(cube):
    function = compiled(lambda x, m, name: x + DeviceMesh._concatenate([m["pp"], m[name]]).size(1))
    assert torch.equal(function(X, cube, "tp"), X + 2)
    other = init_device_mesh("cpu", (2, 1, 4), mesh_dim_names=("pp", "dp", "tp"))
    assert torch.equal(function(X, other, "tp"), X + 4)
    assert torch.equal(function(X, other, "dp"), X + 1)


def test_a_mesh_of_a_destroyed_world_is_not_used():
    shape, names = (2, 4), ("dp", "tp")
    init_device_mesh("cpu", shape, mesh_dim_names=names)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    dist.new_group([0, 1, 2])  # takes the name of a group of the mesh before
    assert MEMORY.mesh("cpu", torch.arange(8).view(shape), names) is None
    again = init_device_mesh("cpu", shape, mesh_dim_names=names)
    assert MEMORY.mesh("cpu", torch.arange(8).view(shape), names) is again


def test_mesh_is_made_where_an_equal_ones_groups_are_gone():
    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"), _init_backend=False)
