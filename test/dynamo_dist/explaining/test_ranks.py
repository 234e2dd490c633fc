"""Reports of other ranks, by a store."""

import pytest
import torch.distributed as dist

from dynamo_dist.explaining import ranks
from dynamo_dist.reporting import RunReport


@pytest.fixture
def store():
    return dist.HashStore()


def test_reports_are_taken_as_given(store):
    given = [RunReport(rank=rank, world_size=3, torch_version="2.13.0") for rank in (1, 2)]
    for report in given:
        ranks.give(store, report)
    assert ranks.take(store, (1, 2), 5) == given


def test_a_missing_rank_is_not_waited_for_for_ever(store):
    ranks.give(store, RunReport(rank=2, world_size=3))
    (report,) = ranks.take(store, (1, 2), 0.2)
    assert report.rank == 2


def test_no_store_without_torchrun_s_agent():
    assert ranks.agent_store({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}) is None
