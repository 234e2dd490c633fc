"""DTensors as large as the data says: a break that names the operation, and eager mode's results
around it.
"""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")

OPERATIONS = {
    "nonzero": torch.nonzero,
    "nonzero method": lambda t: t.nonzero(),
    "nonzero as tuple": lambda t: torch.nonzero(t, as_tuple=True)[0],
    "where": lambda t: torch.where(t > 1)[0],
    "argwhere": torch.argwhere,
    "unique": torch.unique,
    "unique with counts": lambda t: torch.unique(t, return_inverse=True, return_counts=True)[2],
    "unique of rows": lambda t: torch.unique(t, dim=0),
    "unique_consecutive": torch.unique_consecutive,
    "bincount": lambda t: torch.bincount(t.flatten(), minlength=2),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "mask": lambda t: t[t > 1],
    "mask of rows": lambda t: t[t[:, 0] > 1],
    "repeat_interleave": lambda t: torch.repeat_interleave(t.flatten()),
    "slice up to a value": lambda t: t[: t[1, 0].item()],
}


def laid_out(mesh, placement):
    whole = torch.arange(16).view(8, 2) % 3
    return distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None)


@pytest.fixture
def values(mesh):
    return laid_out(mesh, Shard(0))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_size_that_data_tells_breaks_with_its_reason(name, values):
    def program(t):
        return OPERATIONS[name](t * 1) + 0

    with pytest.raises(Unsupported, match="as large as the data says"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(values)
    torch._dynamo.reset()
    found = torch.compile(program, backend="aot_eager")(values)
    assert isinstance(found, DTensor)
    assert_close(found.to_local(), program(values).to_local())


@pytest.mark.parametrize("name", ["nonzero", "mask", "mask of rows"])
def test_replicas_break_too(name, mesh):
    run = torch.compile(OPERATIONS[name], backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="as large as the data says"):
        run(laid_out(mesh, Replicate()))


@pytest.mark.parametrize(
    "program",
    [
        lambda t: t.full_tensor().nonzero(),
        lambda t: t.to_local()[t.to_local() > 1],
        lambda t: torch.nonzero_static(t, size=3).to_local(),
        lambda t: torch.where(t > 1, t, 0).to_local(),
        lambda t: t.clone().masked_fill_(t > 1, 5).to_local(),
        lambda t: t.narrow(0, 0, t[1, 0].item()).to_local(),
        lambda t: DTensor.from_local(
            t.to_local().nonzero(), t.device_mesh, [Replicate()], run_check=False
        ).to_local(),
    ],
)
def test_what_has_a_known_size_stays_in_the_graph(program, values):
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_close(run(values), program(values))


def test_plain_tensors_are_torchs():
    x = torch.arange(6) % 3
    run = torch.compile(lambda x: x[x > 1].unique(), backend="aot_eager", fullgraph=True)
    assert_close(run(x), torch.tensor([2]))
