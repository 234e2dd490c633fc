"""Reports of other ranks, by a store."""

import concurrent.futures
import socket

import pytest
import torch.distributed as dist

from dynamo_dist.cli import explain
from dynamo_dist.diagnostics import RunReport


@pytest.fixture
def store():
    return dist.HashStore()


def test_reports_are_taken_as_given(store):
    given = [RunReport(rank=rank, world_size=3, torch_version="2.13.0") for rank in (1, 2)]
    for report in given:
        explain.give(store, report)
    assert explain.take(store, (1, 2), 5) == given


def test_a_missing_rank_is_not_waited_for_for_ever(store):
    explain.give(store, RunReport(rank=2, world_size=3))
    (report,) = explain.take(store, (1, 2), 0.2)
    assert report.rank == 2


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_without_an_agent_ranks_meet_where_their_group_met():
    port = free_port()
    address = f"127.0.0.1:{port}"
    theirs = dist.TCPStore("127.0.0.1", port, is_master=True)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        coming = threads.submit(explain.own_store, address, False, 10)
        with pytest.raises(TimeoutError):  # the script of rank 0 still runs
            coming.result(timeout=0.5)
        del theirs
        host = explain.own_store(address, True, 10)
        report = RunReport(rank=1, world_size=2)
        explain.give(coming.result(timeout=10), report)
        assert explain.take(host, (1,), 5) == [report]


def test_a_store_that_somebody_keeps_serves_too():
    port = free_port()
    kept = dist.TCPStore("127.0.0.1", port, is_master=True)
    host = explain.own_store(f"127.0.0.1:{port}", True, 1)
    assert host is not None
    assert explain.own_store(f"127.0.0.1:{port}", False, 1) is not None
    del kept


def test_where_nobody_comes_nobody_waits_for_ever():
    assert explain.own_store(f"127.0.0.1:{free_port()}", False, 0.3) is None


def test_where_a_launcher_says_that_ranks_meet():
    assert explain.given_address({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}) == "node0:29500"
    assert explain.given_address({"MASTER_ADDR": "node0"}) == ""


def test_no_store_without_torchrun_s_agent():
    assert explain.agent_store({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}) is None
