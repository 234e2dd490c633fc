"""Shapes that break upstream's tracing: they compile to one graph, and are right."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def wide():
    with fake_mesh(4, 2) as made:
        yield made


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def experts(x, w):
    """Tokens of a batch through one weight, as in a mixture of experts."""
    return (x.flatten(0, 1) @ w).view(*x.shape[:2], -1)


PROGRAMS = {
    "attention": (attention, [((8, 4, 16, 8), (S0, S1))] * 3),
    "attention with fewer batches than ranks": (attention, [((2, 8, 16, 8), (S0, S1))] * 3),
    "flattened": (experts, [((8, 16, 12), (S0, S1)), ((12, 10), (R, R))]),
    "flattened unevenly": (experts, [((6, 10, 12), (S0, S1)), ((12, 10), (R, S1))]),
    "uneven product": (lambda x, w: (x @ w).relu(), [((13, 9), (S0, S1)), ((9, 5), (R, R))]),
    "uneven loss": (F.mse_loss, [((13, 15), (S0, R))] * 2),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        [((13, 3, 8, 8), (S0, R)), ((6, 3, 3, 3), (R, R))],
    ),
}


# Under dynamic=True upstream can trace none of them: it loses track of the global sizes.
CASES = [*((name, True) for name in PROGRAMS), ("attention", False), ("uneven product", False)]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_compiles_to_one_graph_with_eagers_numbers(wide, name, dynamic):
    function, tensors = PROGRAMS[name]
    made = [
        distribute_tensor(torch.randn(shape), wide, layout, src_data_rank=None).requires_grad_()
        for shape, layout in tensors
    ]
    expected = function(*made)
    found = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*made)
    assert found.shape == expected.shape
    if found.placements == expected.placements:
        assert torch.allclose(found.to_local(), expected.to_local(), atol=1e-5)
    found.sum().backward()
    assert all(each.grad.shape == each.shape for each in made)
