import threading
import time

import pytest
import torch.distributed as dist

from dynamo_dist.config import agreement_seconds
from dynamo_dist.errors import ConfigError, RanksDifferError
from dynamo_dist.job.agreement import GroupStates, agree, check_agreement, excuse
from inductor_passes.torch_compat import c10d

SAME = ("cpu 1f", "cpu 2e")
OTHER = ("cpu 1f", "cpu 3d")


def different(what, group, first_rank, theirs, rank):
    return RanksDifferError(f"{what} on {group.name}: {first_rank} {theirs}, {rank} {group.states}")


def run(launches_of_rank, deadline_s=20.0, what="draws of f"):
    """What each rank's check raised; ranks are threads on one store, in a group of two or as given."""
    store = dist.HashStore()
    results = {}

    def one(rank, groups):
        try:
            results[rank] = agree(store, rank, what, groups, deadline_s, different)
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


def on(ranks, launches, name="0"):
    return [GroupStates(name, ranks, launches)]


def test_ranks_that_agree_go_on():
    assert run({r: on((0, 1, 2), SAME) for r in range(3)}) == {0: None, 1: None, 2: None}


def test_every_rank_learns_who_differs_and_where():
    start = time.monotonic()
    results = run({0: on((0, 1, 2), SAME), 1: on((0, 1, 2), OTHER), 2: on((0, 1, 2), SAME)})
    assert time.monotonic() - start < 10
    for error in results.values():
        text = str(error)
        assert isinstance(error, RanksDifferError), results
        assert text.startswith("draws of f on 0") and SAME[1] in text and OTHER[1] in text


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
    assert "rank 1 had not come to compare draws of f" in caplog.text


class FailingStore:
    def compare_set(self, *_):
        raise RuntimeError("connection reset")


def test_a_store_that_fails_costs_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(c10d, "job_store", FailingStore)
    monkeypatch.setattr(c10d, "global_rank", lambda: 0)
    monkeypatch.setattr(c10d, "real_group_ranks", lambda name: (0, 1))
    check_agreement("draws of f", {"0": SAME}, 5.0, different)
    excuse("draws of f", {"0": SAME}, 5.0)
    assert caplog.text.count("the job's store failed (connection reset)") == 2


def test_nobody_waits_for_a_rank_that_is_excused(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(c10d, "job_store", lambda: store)
    monkeypatch.setattr(c10d, "real_group_ranks", lambda name: (0, 1))
    excuse("draws of f", {"0": SAME}, 5.0)
    start = time.monotonic()
    agree(store, 0, "draws of f", on((0, 1), SAME), 20.0, different)
    assert time.monotonic() - start < 5


def test_the_wait_is_read_from_the_environment():
    name = "DYNAMO_DIST_AGREEMENT_SECONDS"
    assert agreement_seconds({}) == 30 and agreement_seconds({name: "0"}) == 0
    for bad in ("soon", "-1", "inf"):
        with pytest.raises(ConfigError, match=name):
            agreement_seconds({name: bad})
