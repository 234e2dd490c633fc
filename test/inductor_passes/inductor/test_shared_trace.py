"""Ranks with one program: who traces ahead, who waits for whom, and that nobody waits for one
that waits.
"""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import fx

from inductor_passes.inductor import shared_trace
from inductor_passes.inductor.shared_trace import SharedTrace
from inductor_passes.ranks.compile_once import Waiting, claim
from inductor_passes.ranks.coordination import Coordination
from inductor_passes.testing import trace
from inductor_passes.torch_compat import rank_reads

HOW = {"static_lifetime_input_indices": []}
ENTRIES = SimpleNamespace(key="key", key_of_all_ranks=lambda: "key", made=lambda: None)


def module(function):
    return fx.GraphModule({}, trace(function, [2, 3]))


@pytest.fixture
def store():
    return Coordination(dist.HashStore())


@pytest.fixture
def joint():
    return module(lambda x: x.sin())


def sharing(store, rank, program="program", is_known=True, is_alike=True):
    stub = SimpleNamespace(
        is_known=lambda: is_known, digest=lambda *key: program, meshes=lambda: {}
    )
    return SharedTrace(store, rank, "options", lambda joint: is_alike, stub)


def has_ended(store, program="program"):
    """Whether a rank that waits for a program has heard."""
    turn = claim(store, f"untraced/{program}", 9, "-")
    return Waiting(store, turn, 9, "-", lambda *_: None).has_ended()


def test_trace_without_reads_is_shared_at_its_end(store, joint):
    one = sharing(store, 0)
    assert not one.missed(ENTRIES)
    one.ask(joint, HOW)
    assert not has_ended(store) and len(one._claims) == 2
    one.end()
    assert has_ended(store)


@pytest.mark.parametrize("why", ["read", "unlike", "inner", "drawn"])
def test_the_others_are_let_go_at_once(store, why):
    one = sharing(store, 0, is_alike=why != "unlike")
    one.missed(ENTRIES)
    if why == "read":
        rank_reads._note("the rank")
    operator = (lambda x: x.bernoulli()) if why == "drawn" else lambda x: x.sin()
    one.ask(module(operator), {} if why == "inner" else HOW)
    assert has_ended(store)
    assert not rank_reads._noticing
    one.end()


def test_so_they_are_where_the_trace_fails(store):
    one = sharing(store, 0)
    one.missed(ENTRIES)
    one.end()
    assert has_ended(store) and not rank_reads._noticing


def test_a_program_of_the_users_own_code_waits_for_nobody(store):
    one = sharing(store, 0, is_known=False)
    assert not one.missed(ENTRIES)
    assert one._ahead is None and not rank_reads._noticing


def test_only_the_first_graph_is_asked_for(store):
    one = sharing(store, 0)
    one.missed(ENTRIES)
    ahead = one._ahead
    assert not one.missed(ENTRIES)
    assert one._ahead is ahead
    one.end()


def test_who_waits_for_another_lets_those_go_that_wait_for_it(store, joint):
    """Else they would answer for its launches alone, and the one that compiles for all needs
    theirs.
    """
    first, second = sharing(store, 0, "first"), sharing(store, 1, "second")
    for each in (first, second):
        each.missed(ENTRIES)
    first.ask(joint, HOW)
    waiting = threading.Thread(target=second.ask, args=(joint, HOW))
    waiting.start()
    for _ in range(500):
        if has_ended(store, "second"):
            break
        threading.Event().wait(0.01)
    assert waiting.is_alive() and has_ended(store, "second") and not has_ended(store, "first")
    first.end()
    waiting.join(10)
    assert not waiting.is_alive()
    second.end()


def test_votes_on_a_graph_of_another_program_are_passed_on(store, joint, monkeypatch):
    published = []
    one = sharing(store, 0)
    one.missed(ENTRIES)
    one.ask(joint, HOW)
    monkeypatch.setattr(shared_trace.shared_compile, "alike", lambda stream: stream)
    for each in one._claims:
        monkeypatch.setattr(each, "offers", lambda stream, offer: published.append(stream) or offer)
    decided = SimpleNamespace(decide=lambda stream, offer: published.append(offer))
    monkeypatch.setattr(shared_trace.shared_compile.decision, "current", lambda: decided)
    monkeypatch.setattr(shared_trace.shared_compile, "replace", lambda stream, groups: stream)
    shared_trace.shared_compile.vote(one.offers, SimpleNamespace(groups=()), "offer")
    assert len(published) == 3 and published[-1] == "offer"
    one.end()
