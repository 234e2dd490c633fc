"""Results of row-sharded embeddings that are not reduced yet, while others are traced."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")

ROWS = torch.arange(1.0, 17.0).view(8, 2)


@pytest.fixture
def table():
    """Of two ranks this is the first; its sums with the other change nothing."""
    with fake_group(2):
        yield distribute_tensor(ROWS, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)


def looked_up(table, *rows):
    """Pending: each rank knows the rows that it holds, and which are the other's."""
    mesh = table.device_mesh
    index = distribute_tensor(torch.tensor(rows), mesh, [Replicate()], src_data_rank=None)
    return F.embedding(index, table)


def program(table):
    return looked_up(table, 7, 2, 0).full_tensor()


def is_right(found, *rows):
    return torch.equal(found, torch.stack([ROWS[row] * (row < 4) for row in rows]))


def test_one_that_was_left_does_not_stop_a_trace(table):
    looked_up(table, 0, 7, 1)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert is_right(compiled(table), 7, 2, 0)


def test_one_that_a_trace_left_does_not_stop_the_next(table):
    def leaving(table, times):
        looked_up(table, 7, 2, 0)
        return table * times

    for times in (2, 3):
        compiled = torch.compile(leaving, backend="aot_eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(table, times).to_local(), times * table.to_local())
    assert is_right(looked_up(table, 1, 6, 5).full_tensor(), 1, 6, 5)


def test_eager_modes_is_the_same_after_a_trace(table):
    pending = looked_up(table, 0, 7, 1)
    assert is_right(torch.compile(program, backend="aot_eager", fullgraph=True)(table), 7, 2, 0)
    assert is_right(pending.full_tensor(), 0, 7, 1)


def test_returned_from_a_graph(table):
    compiled = torch.compile(
        lambda t: looked_up(t, 7, 2, 0) * 2, backend="aot_eager", fullgraph=True
    )
    assert is_right(compiled(table).full_tensor() / 2, 7, 2, 0)


def test_two_pending_at_once(table):
    def program(table):
        return (looked_up(table, 7, 2, 0) + looked_up(table, 1, 1, 6)).full_tensor()

    expected = sum(
        torch.stack([ROWS[row] * (row < 4) for row in rows]) for rows in ((7, 2, 0), (1, 1, 6))
    )
    for call in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        assert torch.equal(call(table), expected)


def test_reduced_twice(table):
    def program(table):
        pending = looked_up(table, 7, 2, 0)
        return pending.full_tensor(), pending.redistribute(placements=[Shard(1)]).to_local()

    for call in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        whole, part = call(table)
        assert is_right(whole, 7, 2, 0)
        assert part.shape == (3, 1)


@pytest.mark.parametrize("rank", range(4))
def test_rows_sharded_over_two_mesh_dimensions(rank):
    """Seven rows over two by two: 2, 2, 2 and 1."""
    with fake_group(4, rank=rank):
        mesh = init_device_mesh("cpu", (2, 2))
        rows = ROWS[:7]
        table = distribute_tensor(rows, mesh, [Shard(0), Shard(0)], src_data_rank=None)
        index = distribute_tensor(
            torch.arange(7), mesh, [Replicate(), Replicate()], src_data_rank=None
        )
        found = F.embedding(index, table)
        mine = torch.arange(7) // 2 == rank
        assert torch.equal(found.to_local(), rows * mine[:, None])


def test_ranks_without_rows():
    """Two rows on four ranks."""
    with fake_group(4, rank=3):
        mesh = init_device_mesh("cpu", (4,))
        table = distribute_tensor(ROWS[:2], mesh, [Shard(0)], src_data_rank=None)
        index = distribute_tensor(torch.tensor([1, 0, 1]), mesh, [Replicate()], src_data_rank=None)
        assert torch.equal(F.embedding(index, table).to_local(), torch.zeros(3, 2))
