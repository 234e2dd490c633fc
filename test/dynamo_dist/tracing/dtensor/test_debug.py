"""CommDebugMode inside a compiled function is refused; around it, it counts."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def tensor(mesh):
    return distribute_tensor(torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None)


def test_inside_it_is_refused_with_a_fix(tensor, compiled):
    def program(d):
        with CommDebugMode() as mode:
            y = d.full_tensor()
        return y, mode.get_total_counts()

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(program)[0](tensor)
    assert "CommDebugMode inside a compiled function" in str(caught.value)
    assert "CommDebugMode() as mode: compiled(x)" in str(caught.value)


def test_the_fix_works(tensor):
    program = torch.compile(lambda d: d.full_tensor(), backend="aot_eager", fullgraph=True)
    program(tensor)
    with torch.compiler.set_stance("force_eager"), CommDebugMode() as mode:
        program(tensor)
    assert mode.get_total_counts() == 1
