"""Ranks take a way together, or none of them does: votes over a store that threads share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dynamo_dist.tracing import wrapper_agreement


@pytest.fixture
def store(monkeypatch):
    shared = dist.HashStore()
    monkeypatch.setattr(wrapper_agreement.c10d, "job_store", lambda: shared)
    return shared


def vote(answers, deadline_s=5.0, what="w"):
    ranks = range(len(answers))
    with ThreadPoolExecutor(len(answers)) as pool:
        said = [
            pool.submit(wrapper_agreement.all_can, what, ranks, can, deadline_s) for can in answers
        ]
        return [each.result() for each in said]


def test_all_can(store):
    assert vote([True, True, True]) == [True] * 3


def test_one_cannot(store):
    assert vote([True, False, True]) == [False] * 3


def test_each_question_is_one_of_its_own(store):
    assert vote([True, False], what="a") == [False] * 2
    assert vote([True, True], what="b") == [True] * 2


def test_who_comes_late_finds_what_was_said_without_it(store):
    assert wrapper_agreement.all_can("w", (0, 1), True, 0.2) is False
    assert wrapper_agreement.all_can("w", (0, 1), True, 5.0) is False


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(wrapper_agreement.c10d, "job_store", lambda: None)
    assert wrapper_agreement.all_can("w", (0, 1), True, 5.0)
    assert not wrapper_agreement.all_can("w", (0, 1), False, 5.0)


def test_no_deadline_asks_nobody(store):
    assert wrapper_agreement.all_can("w", (0, 1), True, 0.0)


def test_a_store_that_fails_leaves_the_old_way(store, monkeypatch):
    def broken(*args):
        raise RuntimeError("gone")

    monkeypatch.setattr(
        wrapper_agreement.c10d, "job_store", lambda: type("S", (), {"compare_set": broken})()
    )
    assert wrapper_agreement.all_can("w", (0, 1), True, 1.0) is False


def test_ranks_that_would_do_it_in_other_ways_do_not(store):
    with ThreadPoolExecutor(2) as pool:
        said = [
            pool.submit(wrapper_agreement.vote, "w", (0, 1), True, 20.0, f"{rank}")
            for rank in (0, 1)
        ]
        assert [each.result() for each in said] == [wrapper_agreement.DIFFERENT] * 2
