import itertools
import threading

import pytest

from dynamo_dist.errors import CompareError
from dynamo_dist.job import rendezvous
from dynamo_dist.job.rendezvous import GRACE_S, Rendezvous


class DictStore:
    """A store in this process; ``gone`` makes it answer like one whose host has died."""

    def __init__(self):
        self.values = {}
        self.gone = False

    def _ask(self):
        if self.gone:
            raise RuntimeError("connection reset")

    def set(self, key, value):
        self._ask()
        self.values[key] = value

    def get(self, key):
        self._ask()
        return self.values[key].encode()

    def check(self, keys):
        self._ask()
        return all(key in self.values for key in keys)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ranks(monkeypatch, clock):
    def make(store, world_size=2, deadline_s=600.0):
        made = []
        for rank in range(world_size):
            # In real life each rank counts its own calls; here one process plays them all.
            monkeypatch.setattr(rendezvous, "_calls", itertools.count(7))
            made.append(Rendezvous(store, rank, world_size, deadline_s, clock, clock.sleep))
        return made

    return make


def test_alone_there_is_nothing_to_wait_for():
    alone = Rendezvous(None)
    assert alone.meet("results", {"a": 1}) == [{"a": 1}]
    assert alone.conclude("running", None) == {}
    assert alone.conclude("running", ValueError("bad")) == {0: "ValueError: bad"}


def test_payloads_come_in_rank_order():
    store = DictStore()
    found = {}
    counter = itertools.count()

    def play(rank):
        member = Rendezvous(store, rank, 3, 10.0)
        member._prefix = "same"
        found[rank] = member.meet("results", {"rank": rank, "nth": next(counter)})

    threads = [threading.Thread(target=play, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [[p["rank"] for p in found[rank]] for rank in range(3)] == [[0, 1, 2]] * 3


def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks, clock):
    first, _, _ = ranks(DictStore(), world_size=3, deadline_s=60.0)
    with pytest.raises(CompareError, match=r"No sign of ranks 1, 2 within 60 s at 'results'"):
        first.meet("results")
    assert 60 <= clock.now < 61


def test_every_rank_learns_who_failed(ranks):
    store = DictStore()
    first, second = ranks(store)
    second._set("running ours/1", '{"failed": "ValueError: bad"}')
    assert first.conclude("running ours", None) == {1: "ValueError: bad"}
    assert second.conclude("running ours", ValueError("bad")) == {1: "ValueError: bad"}


def test_a_broken_connection_names_the_silent_peer_soon(ranks, clock):
    first, _ = ranks(DictStore())
    with pytest.raises(CompareError) as caught:
        first.conclude("running ours", RuntimeError("connection closed by peer"))
    text = str(caught.value)
    assert "failed on rank 0 while running ours: RuntimeError: connection closed by peer" in text
    assert f"No sign of rank 1 within {GRACE_S:.0f} s" in text
    assert clock.now < GRACE_S + 1


def test_a_store_that_is_gone_is_said_to_be(ranks):
    store = DictStore()
    first, _ = ranks(store)
    store.gone = True
    with pytest.raises(CompareError, match="store of the process group does not answer"):
        first.meet("results")


def test_the_holder_of_the_store_leaves_last(ranks, clock):
    first, second = ranks(DictStore())
    second.leave()
    assert clock.now == 0
    first.leave()
    assert clock.now == 0


def test_nobody_waits_long_for_one_that_does_not_leave(ranks, clock):
    store = DictStore()
    first, second = ranks(store)
    first.leave()
    assert GRACE_S <= clock.now < GRACE_S + 1
    store.gone = True
    second.leave()


def test_two_calls_do_not_meet_each_other():
    store = DictStore()
    assert Rendezvous(store, 0, 1)._prefix != Rendezvous(store, 0, 1)._prefix
