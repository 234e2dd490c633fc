"""Gathers along a sharded dimension pick what a rank has, and launch nothing."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def mesh():
    """Of four ranks this is the first, which has the first quarter of the columns."""
    with fake_group(4):
        yield init_device_mesh("cpu", (4,))


def placed(mesh, tensor, placement):
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


LOGITS = torch.arange(1.0, 33.0).view(4, 8)
LABELS = torch.tensor([[1], [7], [0], [2]])


def of_labels(logits, labels):
    return logits.gather(1, labels).squeeze(1)


def test_nothing_is_launched_before_the_sum(mesh):
    with CommDebugMode() as launched:
        found = of_labels(placed(mesh, LOGITS, Shard(1)), placed(mesh, LABELS, Replicate()))
    assert launched.get_total_counts() == 0
    assert found.placements == (Partial(),)
    assert found.to_local().tolist() == [2.0, 0.0, 17.0, 0.0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_in_eager_mode(mesh, dynamic):
    run = torch.compile(of_labels, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = run(placed(mesh, LOGITS, Shard(1)), placed(mesh, LABELS, Replicate()))
    assert found.placements == (Partial(),)
    assert found.to_local().tolist() == [2.0, 0.0, 17.0, 0.0]


def test_batches_of_several_sizes_share_a_graph(mesh):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(of_labels, backend=counter, fullgraph=True)
    for rows in (4, 3, 2):
        logits = placed(mesh, LOGITS[:rows], Shard(1))
        run(logits, placed(mesh, LABELS[:rows], Replicate()))
    assert counter.frame_count <= 2


def test_more_than_one_from_a_row_is_as_before(mesh):
    logits = placed(mesh, LOGITS, Shard(1))
    found = logits.gather(1, placed(mesh, LABELS.expand(4, 3).contiguous(), Replicate()))
    assert found.placements == (Replicate(),)
