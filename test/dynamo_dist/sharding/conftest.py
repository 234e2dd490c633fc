"""What the tests of this folder share."""

import pytest
import torch

from dynamo_dist.numerics.ranks import all_ranks


@pytest.fixture
def ranks():
    """A mesh of 4 ranks, all of them in this process; tensors are drawn outside of it."""
    torch.manual_seed(0)
    with all_ranks(4) as mesh:
        yield mesh


@pytest.fixture
def grid():
    """A mesh of 2 x 2 ranks, all of them in this process."""
    torch.manual_seed(0)
    with all_ranks(2, 2) as mesh:
        yield mesh
