import threading
import time

import pytest
import torch.distributed as dist

from dynamo_dist.config import agreement_seconds
from dynamo_dist.errors import ConfigError, RanksDifferError
from dynamo_dist.runtime import agreement
from dynamo_dist.runtime.agreement import GroupLaunches, agree

SAME = ("all_gather of 8 bytes float32", "all_reduce sum of 4 bytes float32")
OTHER = ("all_gather of 8 bytes float32", "all_reduce sum of 6 bytes float32")


def run(launches_of_rank, deadline_s=20.0, group=None, graph="0/0:forward"):
    """What each rank's check raised; ranks are threads on one store, in a group of two or as given."""
    store = dist.HashStore()
    results = {}

    def one(rank, groups):
        try:
            results[rank] = agree(store, rank, graph, groups, deadline_s)
        except RanksDifferError as error:
            results[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank, groups))
        for rank, groups in launches_of_rank.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Threads share a process, and so the count of how often a graph was met."""
    monkeypatch.setattr(agreement, "_key", lambda graph, group: f"{group.name}/{graph}")


def on(ranks, launches, name="0"):
    return [GroupLaunches(name, ranks, launches)]


def test_ranks_that_agree_go_on():
    assert run({r: on((0, 1, 2), SAME) for r in range(3)}) == {0: None, 1: None, 2: None}


def test_every_rank_learns_who_differs_and_where():
    start = time.monotonic()
    results = run({0: on((0, 1, 2), SAME), 1: on((0, 1, 2), OTHER), 2: on((0, 1, 2), SAME)})
    assert time.monotonic() - start < 10
    for error in results.values():
        text = str(error)
        assert isinstance(error, RanksDifferError), results
        assert "launch 1 is" in text and SAME[1] in text and OTHER[1] in text
        assert "group '0' in graph 0/0:forward" in text and "verify-ranks" in text


def test_a_rank_that_launches_less_differs():
    results = run({0: on((0, 1), SAME), 1: on((0, 1), SAME[:1])})
    assert all("no further launch" in str(error) for error in results.values())


def test_a_difference_in_one_group_ends_the_wait_in_another():
    start = time.monotonic()
    results = run(
        {
            0: on((0, 1), SAME, "a") + on((0, 2), SAME, "b"),
            1: on((0, 1), OTHER, "a"),
            2: on((0, 2), SAME, "b"),
        }
    )
    assert isinstance(results[0], RanksDifferError) and isinstance(results[1], RanksDifferError)
    assert time.monotonic() - start < 10


def test_a_rank_that_does_not_come_costs_a_warning(caplog):
    assert run({0: on((0, 1), SAME)}, deadline_s=0.1) == {0: None}
    assert "rank 1 had not compiled graph 0/0:forward" in caplog.text


def test_a_graph_met_again_is_compared_again(monkeypatch):
    monkeypatch.undo()
    (group,) = on((0, 1), SAME, "met again")
    assert agreement._key("g", group) != agreement._key("g", group)


def test_the_wait_is_read_from_the_environment():
    name = "DYNAMO_DIST_AGREEMENT_SECONDS"
    assert agreement_seconds({}) == 30 and agreement_seconds({name: "0"}) == 0
    for bad in ("soon", "-1", "inf"):
        with pytest.raises(ConfigError, match=name):
            agreement_seconds({name: bad})
