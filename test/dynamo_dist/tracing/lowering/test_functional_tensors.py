"""What functional collectives return is asked to wait in a graph, as in eager mode."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch._dynamo.exc import Unsupported
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")


def reduced(x, mesh):
    return funcol.all_reduce(x, "sum", (mesh, 0))


PROGRAMS = {
    "trigger_wait": lambda x, m: reduced(x, m).trigger_wait() + 1,
    "wait": lambda x, m: reduced(x, m).wait() + 1,
    "of a view": lambda x, m: reduced(x, m).view(2, 2).trigger_wait() * 2,
    "of a list's": lambda x, m: funcol.all_reduce_coalesced([x, x + 1], "sum", (m, 0))[1].wait(),
    "of a gather": lambda x, m: funcol.all_gather_tensor(x, 0, (m, 0)).trigger_wait().sum(),
    "after another use": lambda x, m: (lambda y: (y + 1, y.trigger_wait() * 1))(reduced(x, m)),
    "asked whether it has it": lambda x, m: (
        lambda y: y.wait() if hasattr(y, "trigger_wait") else y * 0
    )(reduced(x, m)),
    "asked whether it is done": lambda x, m: (lambda y: (y.trigger_wait() + 1, y.completed))(
        reduced(x, m)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_waits_as_in_eager_mode(name, mesh):
    x = torch.arange(4.0)
    expected = PROGRAMS[name](x, mesh["tp"])
    run = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)
    assert_close(run(x, mesh["tp"]), expected)


def test_other_tensors_have_no_such_method():
    with pytest.raises((Unsupported, AttributeError), match="trigger_wait"):
        torch.compile(lambda x: (x + 1).trigger_wait(), backend="aot_eager", fullgraph=True)(
            torch.ones(2)
        )
