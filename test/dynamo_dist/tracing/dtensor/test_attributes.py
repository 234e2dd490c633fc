"""hasattr and getattr with a default answer as eager does, on inputs, parameters and
intermediates.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.usefixtures("enabled")

NAMES = (
    "to_local",
    "full_tensor",
    "redistribute",
    "placements",
    "device_mesh",
    "_spec",
    "_local_tensor",
    "__create_chunk_list__",
    "shape",
    "view",
    "absent",
)
KINDS = {
    "input": lambda d: d,
    "intermediate": lambda d: d * 2,
    "parameter": lambda d: torch.nn.Parameter(d),
    "local": lambda d: d.to_local(),
}


@pytest.fixture
def tensor(mesh):
    return distribute_tensor(torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_hasattr_and_getattr(tensor, compiled, name, kind):
    make = KINDS[kind]
    if kind in ("parameter", "local"):
        tensor, make = make(tensor), lambda d: d

    def program(d):
        found = make(d)
        return d + 1, hasattr(found, name), getattr(found, name, None) is not None

    assert compiled(program)[0](tensor)[1:] == program(tensor)[1:]


def test_the_branch_that_eager_takes(tensor, compiled):
    def program(d):
        return d.full_tensor() if hasattr(d, "full_tensor") else d

    found = compiled(program)[0](tensor)
    assert not isinstance(found, DTensor)
    assert torch.equal(found, program(tensor))


def test_a_plain_tensor_in_the_same_place_recompiles(tensor, compiled):
    program, graphs = compiled(lambda x: x + 1 if hasattr(x, "to_local") else x - 1)
    plain = torch.ones(2)
    assert torch.equal(program(plain), plain - 1)
    assert torch.equal(program(tensor).to_local(), tensor.to_local() + 1)
    assert torch.equal(program(plain), plain - 1)
    assert len(graphs) == 2


def test_an_attribute_of_one_tensor_is_guarded(tensor, compiled):
    program, graphs = compiled(lambda x: x + 1 if hasattr(x, "mark") else x - 1)
    assert torch.equal(program(tensor).to_local(), tensor.to_local() - 1)
    tensor.mark = True
    assert torch.equal(program(tensor).to_local(), tensor.to_local() + 1)
    assert len(graphs) == 2


def test_the_spec_of_an_intermediate(tensor, compiled):
    def program(d):
        y = d.t().contiguous()
        return DTensor(y._local_tensor + 1, y._spec, requires_grad=False)

    found, expected = compiled(program)[0](tensor), program(tensor)
    assert (found.placements, found.shape, found.stride()) == (
        expected.placements,
        expected.shape,
        expected.stride(),
    )
    assert torch.equal(found.to_local(), expected.to_local())


def test_writing_to_the_local_tensor_writes_to_the_dtensor(mesh):
    def program(d):
        d._local_tensor.mul_(2)
        return d * 1

    def made():
        return distribute_tensor(
            torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None
        )

    eager, compiled = made(), made()
    torch.testing.assert_close(
        torch.compile(program, backend="aot_eager", fullgraph=True)(compiled).to_local(),
        program(eager).to_local(),
    )
    torch.testing.assert_close(compiled.to_local(), eager.to_local())
