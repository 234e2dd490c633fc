"""What is pending, changed in place: in eager mode, and where it is an input of a compiled
graph.
"""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dynamo_dist.errors import StrategyError
from dynamo_dist.numerics.ranks import split, whole_tensor
from dynamo_dist.testing import fake_mesh
from inductor_passes.graph.collectives import launches
from inductor_passes.inductor.graph_module import capturing

pytestmark = pytest.mark.usefixtures("enabled")


def sum_of(x):
    return x.sum(0)


def largest_of(x):
    return x.amax(0)


def mean_of(x):
    return x.mean(0)


def norm_of(x):
    return torch.norm(x)


def squared(pending):
    pending.square_()


def shrunk(pending):
    pending.mul_(0.25).add_(1)


def doubled(pending):
    pending.add_(pending)


def emptied(pending):
    pending.zero_()


def list_of_one(pending):
    torch._foreach_mul_([pending], 3.0)


MADE = (sum_of, largest_of, mean_of, norm_of)
CHANGED = (squared, shrunk, doubled, emptied, list_of_one)
X = torch.arange(32.0).view(8, 4) - 9


@pytest.mark.parametrize("patch", CHANGED)
@pytest.mark.parametrize("make", MADE)
def test_eager_is_as_on_one_device(ranks, make, patch):
    found, expected = make(split(X, ranks, [Shard(0)])), make(X)
    patch(found)
    patch(expected)
    assert isinstance(found.placements[0], Partial)
    torch.testing.assert_close(whole_tensor(found), expected)


def pending_twice(make, mesh):
    x = distribute_tensor(X, mesh, [Shard(0)], src_data_rank=None)
    return make(x), make(x)


@pytest.mark.parametrize("patch", CHANGED)
@pytest.mark.parametrize("make", MADE)
def test_compiled_is_as_eager(make, patch):
    with fake_mesh(4) as mesh:
        pending, expected = pending_twice(make, mesh)
        torch.compile(patch, backend="aot_eager", fullgraph=True)(pending)
        patch(expected)
        assert pending.placements == expected.placements
        torch.testing.assert_close(pending.to_local(), expected.to_local())


def test_it_is_lowered(without_kernels):
    with fake_mesh(4) as mesh:
        torch.compile(shrunk, backend="inductor", fullgraph=True)(pending_twice(norm_of, mesh)[0])


def test_a_copy_of_another_kind_is_no_copy_of_parts(ranks):
    """Halves of 1 are no whole numbers, and 1 of a largest is not 1 of a sum."""
    for target, value in [(torch.zeros(4, dtype=torch.long), torch.ones(4)), (X[0], X[1])]:
        found = split(target, ranks, [Partial()])
        found.copy_(split(value, ranks, [Replicate() if target is X[0] else Partial()]))
        torch.testing.assert_close(whole_tensor(found), value.to(target.dtype))


@pytest.mark.parametrize(
    "patch", [lambda n: n.neg_(), lambda n: n.sub_(1), lambda n: n.mul_(-1), lambda n: n.log_()]
)
def test_a_norm_in_parts_cannot_become_negative(ranks, patch):
    """The parts' squares are summed up, so that the sign would be lost without a word."""
    norm = torch.norm(split(X, ranks, [Shard(0)]))
    with pytest.raises(StrategyError, match="may be negative, which the parts of a norm cannot"):
        patch(norm)
    whole = norm.redistribute(placements=[Replicate()])
    patch(whole)
    torch.testing.assert_close(whole_tensor(whole), patch(torch.norm(X)))


def test_one_that_is_trained_stays_in_parts():
    """AOTAutograd copies such an input first: the copy is pending too, or the whole would come
    back as a part.
    """

    def step(pending):
        scaled = pending * 3
        pending.detach().neg_()
        return scaled

    def run(mesh, backend):
        pending = sum_of(distribute_tensor(X, mesh, [Shard(0)], src_data_rank=None)).detach()
        expected = -pending.to_local()
        result = torch.compile(step, backend=backend, fullgraph=True)(pending.requires_grad_())
        result.backward(torch.ones_like(result))
        return pending, expected

    with fake_mesh(4) as mesh:
        pending, expected = run(mesh, "aot_eager")
        assert isinstance(pending.placements[0], Partial)
        torch.testing.assert_close(pending.to_local(), expected)
        torch.testing.assert_close(pending.grad.to_local(), torch.full((4,), 3.0))
        torch.compiler.reset()
        with capturing() as (backend, graphs):
            run(mesh, backend)
    assert len(graphs) == 2 and not any(list(launches(graph.graph)) for graph in graphs)
