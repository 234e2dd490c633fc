"""Of ranks with one key one compiles, the others wait for it: not for one that died, and not for
a store that fails.
"""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from inductor_passes.ranks import compile_once
from inductor_passes.ranks.collective_trace import PROGRAM, CollectiveTrace, Group, Launch
from inductor_passes.ranks.compile_once import Claim, End, Turn, Waiting, claim
from inductor_passes.ranks.coordination import Coordination, CoordinationError

STREAM = CollectiveTrace((Group("0", (0, 1)),), (Launch("all_reduce sum float32", 0, ("f:3",), 8),))


@pytest.fixture(autouse=True)
def soon_silent(monkeypatch):
    monkeypatch.setattr(compile_once, "BEAT_S", 0.02)
    monkeypatch.setattr(compile_once, "SILENT_S", 0.3)
    monkeypatch.setattr(compile_once, "LOOK_S", 0.01)
    monkeypatch.setattr(compile_once, "VERDICT_S", 0.2)
    compile_once._silent.clear()
    compile_once._late.clear()


class Chosen:
    """What the compiling rank would launch, and the plans that it can follow."""

    def __init__(self, plan, *follows):
        self._plan, self._follows = plan, follows

    def plan(self):
        return self._plan

    def can_follow(self, plan):
        return plan in self._follows


def waiting(store, turn, rank, vote=lambda trace, offer: None):
    return Waiting(store, turn, rank, "-", vote)


def in_a_thread(function):
    return ThreadPoolExecutor(1).submit(function)


def test_one_claims_a_key_and_the_others_learn_who():
    store = Coordination(dist.HashStore())
    found = [claim(store, "k", rank, "-") for rank in range(3)]
    assert isinstance(found[0], Claim)
    assert found[1:] == [Turn("k", 0, 0, "-")] * 2
    another = claim(store, "another", 1, "-")
    assert isinstance(another, Claim)
    for each in (found[0], another):
        each.end("", None)


def test_waiter_gets_the_digest_of_the_entry_or_none():
    store = Coordination(dist.HashStore())
    for digest in ("abc", ""):
        turn = claim(store, digest, 0, "-")
        waits = in_a_thread(waiting(store, claim(store, digest, 1, "-"), 1).outcome)
        time.sleep(0.5)  # longer than one that is silent would be waited for
        assert not waits.done()
        turn.end(digest, None)
        assert waits.result(5) == End(digest)


def test_an_entry_goes_through_the_store_where_it_was_asked_for():
    store = Coordination(dist.HashStore())
    turn = claim(store, "k", 0, "-")
    waits = waiting(store, claim(store, "k", 1, "-"), 1)
    assert not turn.is_wanted()
    waits.want()
    assert turn.is_wanted()
    turn.end("d", b"code")
    assert waits.outcome() == End("d")
    assert waits.entry() == b"code"


def test_what_is_too_long_for_the_store_does_not_go_there(monkeypatch):
    monkeypatch.setattr(compile_once, "MOST_BYTES", 3)
    store = Coordination(dist.HashStore())
    turn = claim(store, "k", 0, "-")
    waits = waiting(store, claim(store, "k", 1, "-"), 1)
    turn.end("d", b"code")
    assert waits.entry() is None


def test_one_of_the_others_takes_the_place_of_a_rank_that_died():
    store = Coordination(dist.HashStore())
    dead = claim(store, "k", 0, "-")
    dead._over.set()  # beats no more, and ends nothing
    waits = [in_a_thread(waiting(store, dead.turn, rank).outcome) for rank in (1, 2, 3)]
    while not (done := [each for each in waits if each.done()]):
        time.sleep(0.01)
    (next_one,) = done
    assert next_one.result().turn.number == 1
    time.sleep(0.5)
    assert [each.done() for each in waits].count(True) == 1  # the others wait for it now
    next_one.result().end("d", None)
    assert [each.result(5) for each in waits if each is not next_one] == [End("d")] * 2


def test_who_waits_votes_as_the_rank_that_compiles():
    store, voted = Coordination(dist.HashStore()), []
    turn = claim(store, "k", 0, "-")

    def vote(trace, offer):
        voted.append((trace, offer.plan(), offer.can_follow("a"), offer.can_follow("b")))
        voted.append(offer.can_follow(PROGRAM))

    waits = in_a_thread(waiting(store, claim(store, "k", 1, "-"), 1, vote).outcome)
    offer = turn.offers(STREAM, Chosen("mine", "a"))
    assert (offer.plan(), offer.can_follow("a"), offer.can_follow("b")) == ("mine", True, False)
    while len(voted) < 2:
        time.sleep(0.01)
    turn.end("d", None)
    assert waits.result(5) == End("d")
    assert voted == [(STREAM, "mine", True, False), True]


def test_who_gets_no_answer_compiles_by_itself_and_casts_no_vote():
    store, voted = Coordination(dist.HashStore()), []
    turn = claim(store, "k", 0, "-")

    def vote(trace, offer):
        voted.append(offer.can_follow("nobody asked"))

    turn.offers(STREAM, Chosen("mine"))
    assert waiting(store, claim(store, "k", 1, "-"), 1, vote).outcome() == End("")
    assert voted == []
    turn.end("d", None)


@pytest.mark.parametrize("ends", [True, False])
def test_waiter_takes_the_entry_or_the_turn_of_a_dead_compiler(ends, monkeypatch):
    monkeypatch.setattr(compile_once, "VERDICT_S", 5.0)
    store = Coordination(dist.HashStore())
    turn = claim(store, "k", 0, "-")
    turn.offers(STREAM, Chosen("mine"))
    if ends:
        turn.end("d", None)
    else:
        turn._over.set()

    found = waiting(
        store, turn.turn, 1, lambda trace, offer: offer.can_follow("nobody asked")
    ).outcome()
    assert found == End("d") if ends else isinstance(found, Claim)
    if not ends:
        found.end("", None)


def test_a_plan_of_one_that_died_is_the_programs():
    store, voted = Coordination(dist.HashStore()), []
    dead = claim(store, "k", 0, "-")
    dead.offers(STREAM, Chosen("mine"))
    dead._over.set()
    found = waiting(store, dead.turn, 1, lambda trace, offer: voted.append(offer.plan())).outcome()
    assert isinstance(found, Claim)
    assert voted == [PROGRAM]
    found.end("", None)


class Broken:
    """A store that is gone."""

    def __getattr__(self, name):
        def fail(*args):
            raise RuntimeError("connection reset")

        return fail


def test_a_store_that_goes_ends_no_compile():
    store = Coordination(dist.HashStore())
    turn = claim(store, "k", 0, "-")
    turn._job = Coordination(Broken())
    turn.offers(STREAM, Chosen("mine")).plan()
    assert not turn.is_wanted()
    turn.end("d", b"code")
    with pytest.raises(CoordinationError):
        waiting(Coordination(Broken()), turn.turn, 1).outcome()


def test_no_thread_beats_after_the_end():
    turn = claim(Coordination(dist.HashStore()), "k", 0, "-")
    turn.end("", None)
    time.sleep(0.2)
    assert not [each for each in threading.enumerate() if each.name == "inductor_passes beat"]


class Compiling:
    """A rank that compiles on a thread of its own: ``in_one`` function, or in one after the
    other.
    """

    def __init__(self, store, key, rank=0, in_one=True):
        self._store, self._key, self._rank, self._in_one = store, key, rank, in_one
        self._over = threading.Event()
        self.claim = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        while self.claim is None:
            time.sleep(0.001)
        return self.claim

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self.claim.end("", None)

    def _run(self):
        self.claim = claim(self._store, self._key, self._rank, "-")
        while not self._over.is_set():
            self._one()
            if not self._in_one:
                self._other()

    def _one(self):
        self._over.wait(0.03)

    def _other(self):
        self._over.wait(0.03)


def outcome(store, turn, still_s, rank=1):
    """How a wait ended, and after how long."""
    began = time.monotonic()
    waits = Waiting(store, turn, rank, "-", lambda trace, offer: None, still_s=still_s)
    return waits.outcome(), time.monotonic() - began


def test_a_compile_that_hangs_costs_one_deadline(caplog):
    store = Coordination(dist.HashStore())
    with Compiling(store, "whole") as whole, Compiling(store, "half") as half:
        found, seconds = outcome(store, whole.turn, 0.3)
        assert found == End("") and seconds > 0.25
        assert "Rank 0 has been compiling a graph for" in caplog.text
        assert "compiles it for itself" in caplog.text
        found, seconds = outcome(store, half.turn, 30.0)  # of the same compile
        assert found == End("") and seconds < 10
    assert outcome(store, whole.turn, 0.3)[0] == End("")
    with Compiling(store, "next", in_one=False) as later:  # it has come to an end after all
        waits = in_a_thread(lambda: outcome(store, later.turn, 0.3))
        time.sleep(0.5)
        later.end("d", None)
        assert waits.result(5)[0] == End("d")


def test_a_long_compile_that_goes_on_is_waited_for():
    store = Coordination(dist.HashStore())
    with Compiling(store, "k", in_one=False) as turn:
        waits = in_a_thread(lambda: outcome(store, turn.turn, 0.3))
        time.sleep(1.0)
        assert not waits.done()
        turn.end("d", None)
        assert waits.result(5)[0] == End("d")


def test_no_compile_is_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(compile_once, "MOST_STILL", 2)
    store = Coordination(dist.HashStore())
    with Compiling(store, "k", in_one=False) as turn:
        found, seconds = outcome(store, turn.turn, 0.3)
        assert found == End("") and seconds > 0.5


def test_who_waits_for_a_plan_of_a_compile_that_hangs_goes_on():
    store, voted = Coordination(dist.HashStore()), []
    with Compiling(store, "k") as turn:
        turn.offers(STREAM, Chosen("mine"))
        waits = Waiting(
            store, turn.turn, 1, "-", lambda trace, offer: voted.append(offer.plan()), still_s=0.2
        )
        assert in_a_thread(waits.outcome).result(5) == End("")
        assert voted == [PROGRAM]


def test_who_waits_says_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(compile_once, "SAY_S", 0.1)
    monkeypatch.setattr(compile_once, "LONG_S", 0.25)
    caplog.set_level(logging.INFO, compile_once.log.name)
    store = Coordination(dist.HashStore())
    with Compiling(store, "k", rank=3) as turn:
        outcome(store, turn.turn, 0.5)
    said = [each for each in caplog.records if each.message.startswith("Waiting for rank 3")]
    assert 2 <= len(said) <= 6
    assert (said[0].levelname, said[-1].levelname) == ("INFO", "WARNING")


def test_a_rank_that_died_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(compile_once, "SILENT_S", 1.0)
    store = Coordination(dist.HashStore())
    dead = [claim(store, key, 0, "-") for key in ("whole", "half")]
    for each in dead:
        each._over.set()
    first, seconds = outcome(store, dead[0].turn, 9)
    assert isinstance(first, Claim) and seconds > 1.0
    second, seconds = outcome(store, dead[1].turn, 9)
    assert isinstance(second, Claim) and seconds < 1.0
    for each in (first, second):
        each.end("", None)
