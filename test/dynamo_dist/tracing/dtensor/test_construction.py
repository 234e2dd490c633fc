"""DTensors made inside a compiled function: the constructor, distribute_tensor, factories."""

import pytest
import torch
import torch.distributed.tensor as dt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.usefixtures("enabled")

LAYOUTS = {
    "sharded": (Replicate(), Shard(0)),
    "sharded twice": (Shard(1), Shard(0)),
    "replicated": (Replicate(), Replicate()),
    "negative dimension": (Replicate(), Shard(-1)),
}


def equal(a, b):
    assert (a.placements, a.shape, a.stride(), a.dtype) == (
        b.placements,
        b.shape,
        b.stride(),
        b.dtype,
    )
    assert a.requires_grad == b.requires_grad
    assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_distribute_tensor(mesh, compiled, layout, rows):
    x = torch.arange(rows * 8.0).view(rows, 8)

    def program(x):
        return distribute_tensor(x, mesh, LAYOUTS[layout], src_data_rank=None) * 2

    equal(compiled(program)[0](x), program(x))


def test_distribute_tensor_as_a_partial(mesh, compiled):
    def program(x):
        return distribute_tensor(x, mesh, (Replicate(), Partial()), src_data_rank=None)

    equal(compiled(program)[0](torch.ones(4)), program(torch.ones(4)))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "negative dimension"])
@pytest.mark.parametrize("name", ["zeros", "ones", "full"])
def test_factories(mesh, compiled, name, layout):
    args = ((16, 8), 3.0) if name == "full" else ((16, 8),)

    def program(x):
        made = getattr(dt, name)(*args, device_mesh=mesh, placements=LAYOUTS[layout])
        return x + made.full_tensor(), made

    x = torch.ones(16, 8)
    found, expected = compiled(program)[0](x), program(x)
    assert torch.equal(found[0], expected[0])
    equal(found[1], expected[1])


def test_factories_know_the_dtype(mesh, compiled):
    program, _ = compiled(
        lambda x: x + dt.ones(4, dtype=torch.float64, device_mesh=mesh).to_local()
    )
    assert program(torch.ones(4)).dtype == torch.float64


def test_the_constructor_takes_no_part_in_autograd(mesh, compiled):
    d = distribute_tensor(torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None)
    d.requires_grad_()

    def program(d):
        return DTensor(d._local_tensor * 2, d._spec, requires_grad=False)

    equal(compiled(program)[0](d), program(d))


def test_a_new_leaf_is_refused_with_a_fix(mesh, compiled):
    d = distribute_tensor(torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None)
    program, _ = compiled(lambda d: DTensor(d._local_tensor, d._spec, requires_grad=True))
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        program(d)
    assert "New DTensor that requires gradients" in str(caught.value)
    assert "distribute_tensor(x.detach(), mesh, ...)" in str(caught.value)


def test_unusual_placement_from_one_rank_is_refused(mesh, compiled):
    strided = dt.placement_types._StridedShard(0, split_factor=2)
    program, _ = compiled(lambda x: distribute_tensor(x, mesh, (Replicate(), strided)))
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        program(torch.ones(16, 8))
    assert "Tensor distributed from one rank in an unusual placement" in str(caught.value)
    assert "distribute_tensor(..., src_data_rank=None)" in str(caught.value)


def test_each_mesh_dimension_scatters_once(mesh, compiled):
    program, graphs = compiled(lambda x: distribute_tensor(x, mesh, (Shard(0), Shard(1))) * 2)
    x = torch.arange(16 * 8.0).view(16, 8)
    found = program(x)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("scatter" in target for target in targets) == 2
    equal(found, distribute_tensor(x, mesh, (Shard(0), Shard(1)), src_data_rank=None) * 2)


def test_from_local_takes_the_mesh_of_the_context(mesh, compiled):
    def program(x):
        with mesh["tp"]:
            return DTensor.from_local(x, placements=[Shard(0)], run_check=False) * 2

    equal(compiled(program)[0](torch.ones(2, 8)), program(torch.ones(2, 8)))


def test_from_local_with_a_check_is_refused_with_a_fix(mesh, compiled):
    program, _ = compiled(
        lambda x: DTensor.from_local(x, mesh, (Replicate(), Shard(0)), run_check=True)
    )
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        program(torch.ones(4))
    assert "DTensor.from_local with run_check" in str(caught.value)
    assert "DTensor.from_local(x, mesh, placements, run_check=False)" in str(caught.value)


def test_full_tensor_with_a_layout_for_its_gradient(mesh):
    def program(d):
        return d.full_tensor(grad_placements=[Replicate(), Replicate()]) * 3

    grads = []
    for function in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        d = distribute_tensor(torch.ones(16, 8), mesh, LAYOUTS["sharded"], src_data_rank=None)
        d.requires_grad_()
        function(d).sum().backward()
        grads.append(d.grad)
    equal(*grads)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, d):
        return d.mul(2).add_(1).to_local()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_autograd_function_of_a_dtensor(mesh, compiled):
    d = distribute_tensor(torch.ones(16, 8), mesh, LAYOUTS["sharded"], src_data_rank=None)
    d.requires_grad_()
    assert torch.equal(compiled(lambda d: Doubled.apply(d).sin())[0](d), Doubled.apply(d).sin())


@pytest.mark.parametrize(
    ("rows", "local", "warned"), [(10, 3, False), (10, 2, True), (8, 2, False)]
)
def test_a_local_tensor_that_is_not_this_ranks_part_of_the_shape(mesh, caplog, rows, local, warned):
    """Of 10 rows on 4 ranks torch gives the first 3."""

    def program(x):
        return DTensor.from_local(
            x, mesh["tp"], [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1)
        )

    found = torch.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(local, 2))
    assert found.shape == (rows, 2)
    assert ("rank's part is (3, 2)" in caplog.text) is warned
