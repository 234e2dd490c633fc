"""Ranks run a wrapper in a graph together, or none of them does: votes over a store that threads
share.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dynamo_dist.tracing import eager_fallback
from dynamo_dist.tracing.eager_fallback import vote
from inductor_passes.ranks import coordination
from inductor_passes.ranks.coordination import ALL, DIFFERENT, NOT_ALL, Coordination, unanimous


@pytest.fixture
def store(monkeypatch):
    shared = dist.HashStore()
    monkeypatch.setattr(eager_fallback.c10d, "job_store", lambda: shared)
    monkeypatch.setattr(eager_fallback.c10d, "global_rank", lambda: 0)
    monkeypatch.setenv(coordination.SECONDS, "0.2")
    return shared


def all_vote(store, answers, key="w", hows=None):
    ranks = range(len(answers))

    def one(me):
        how = "" if hows is None else hows[me]
        steps = unanimous(key, "do it", me, ranks, answers[me], how)
        return Coordination(store).run(steps, 5.0)

    with ThreadPoolExecutor(len(answers)) as pool:
        return list(pool.map(one, ranks))


def test_all_can(store):
    assert all_vote(store, [True, True, True]) == [ALL] * 3


def test_one_cannot(store):
    assert all_vote(store, [True, False, True]) == [NOT_ALL] * 3


def test_each_key_is_a_vote_of_its_own(store):
    assert all_vote(store, [True, False], "a") == [NOT_ALL] * 2
    assert all_vote(store, [True, True], "b") == [ALL] * 2


def test_ranks_that_differ_in_how_do_not(store):
    assert all_vote(store, [True, True], hows=["0", "1"]) == [DIFFERENT] * 2


def test_late_rank_finds_the_verdict_without_it(store, caplog):
    assert vote("w", "do it", (0, 1), True) == NOT_ALL
    assert "Before the deadline, rank 1 did not do it." in caplog.text
    assert vote("w", "do it", (0, 1), True) == NOT_ALL


def test_rank_that_waits_says_for_whom(store, caplog, monkeypatch):
    monkeypatch.setattr(coordination, "SAY_S", 0.05)
    vote("w", "do it", (0, 1, 2), True)
    assert "Waiting for ranks 1, 2 to do it: 0 s of at most 0 s." in caplog.text


def test_one_process_decides_alone(monkeypatch):
    monkeypatch.setattr(eager_fallback.c10d, "job_store", lambda: None)
    assert vote("w", "do it", (0, 1), True) == ALL
    assert vote("w", "do it", (0, 1), False) == NOT_ALL


def test_no_deadline_decides_alone(store, monkeypatch):
    monkeypatch.setenv(coordination.SECONDS, "0")
    assert vote("w", "do it", (0, 1), True) == ALL


def test_failing_store_leaves_eager_mode(store, monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("gone")

    failing = type("Failing", (), {"compare_set": broken})()
    monkeypatch.setattr(eager_fallback.c10d, "job_store", lambda: failing)
    assert vote("w", "do it", (0, 1), True) == NOT_ALL
    assert "Ranks could not agree on whether to do it: RuntimeError: gone" in caplog.text
