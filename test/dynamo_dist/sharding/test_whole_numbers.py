"""Whole numbers whose sum is pending: what is written to them is the sum afterwards.

``programs.py`` has two of these, which real ranks run compiled as well.
"""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from dynamo_dist.numerics.ranks import split, whole_tensor

VALUES, OTHERS = torch.tensor([5, 7, -3]), torch.tensor([1, 2, 3])


def set_item(q, r):
    q[0] = 9
    return q


WRITES = {
    "a number is added": lambda q, r: q.add_(1),
    "added": lambda q, r: q.add_(r),
    "clamped": lambda q, r: q.clamp_(0, 5),
    "copied": lambda q, r: q.copy_(r),
    "fractions copied": lambda q, r: q.copy_(r * 1.5),
    "filled": lambda q, r: q.fill_(3),
    "filled by a tensor": lambda q, r: q.fill_(torch.tensor(3)),
    "filled at an index": lambda q, r: q.index_fill_(0, torch.tensor([1]), 5),
    "filled by a mask": lambda q, r: q.masked_fill_(r > 1, 9),
    "one element": set_item,
}


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_there(ranks, name, dtype):
    q = split(VALUES.to(dtype), ranks, [Partial()], False)
    r = split(OTHERS.to(dtype), ranks, [Replicate()], False)
    found = WRITES[name](q, r)
    assert found.placements == (Partial(),)
    torch.testing.assert_close(
        whole_tensor(found), WRITES[name](VALUES.to(dtype), OTHERS.to(dtype))
    )


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("value", [0, 3])
@pytest.mark.parametrize("reduce", ["sum", "avg", "max"])
def test_filling_asks_no_rank_for_what_is_overwritten(ranks, reduce, value):
    q = split(torch.ones(3), ranks, [Partial(reduce)], False)
    with CommDebugMode() as launched:
        q.fill_(value)
    assert launched.get_total_counts() == 0
    torch.testing.assert_close(whole_tensor(q), torch.full((3,), float(value)))


@pytest.mark.usefixtures("enabled")
def test_parts_on_two_mesh_dimensions(grid):
    q = split(VALUES, grid, [Partial(), Partial()], False)
    torch.testing.assert_close(whole_tensor(q.add_(1)), VALUES + 1)
