"""All ranks use one text, or none does: whoever fails, comes late or dies."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from inductor_passes.agree.share import Shared, fail, share
from inductor_passes.agree.store import Await, ReadAll, StoreFailedError, Swap, Write, run


def joined(of_ranks):
    return " ".join(of_ranks[rank] for rank in sorted(of_ranks))


def on_threads(*ranks, deadline_s=5.0):
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda steps: run(steps, store, "", deadline_s), ranks))


def test_all_ranks_get_what_rank_0_made():
    found = on_threads(*(share(rank, 3, "x", "abc"[rank], joined) for rank in range(3)))
    assert found == [Shared("a b c")] * 3


def test_a_rank_that_fails_is_named_and_nobody_waits():
    ranks = share(0, 3, "x", "a", joined), fail(1, "x", "KeyError"), share(2, 3, "x", "c", joined)
    found = on_threads(*ranks, deadline_s=60.0)
    assert found[0] == found[2] == Shared(None, "rank 1: KeyError")


def test_a_rank_that_never_comes_leaves_the_others_without():
    found = on_threads(share(0, 3, "x", "a", joined), share(1, 3, "x", "b", joined), deadline_s=0.2)
    assert {each.text for each in found} == {None}
    assert len({each.why for each in found}) == 1


def test_what_cannot_be_made_is_nobodys():
    def refuse(of_ranks):
        raise ValueError("nothing launches")

    found = on_threads(*(share(rank, 2, "x", "a", refuse) for rank in range(2)))
    assert found == [Shared(None, "nothing launches")] * 2


LOST = "raised StoreFailedError"


class Stepped:
    """Ranks that take one operation each time they are chosen; waiting ends when chosen without its key: too late.

    ``fails``: a rank, and after how many of its operations the store fails for it alone, for good.
    """

    def __init__(self, *ranks, fails=(None, 0)):
        self.held, self.answers, self.found = {}, [None] * len(ranks), {}
        self.ranks = list(ranks)
        self.failing, self.healthy = fails

    def step(self, rank):
        if rank in self.found:
            return
        if rank == self.failing:
            if not self.healthy:
                self.found[rank] = LOST
                return
            self.healthy -= 1
        try:
            operation = self.ranks[rank].send(self.answers[rank])
        except StopIteration as stop:
            self.found[rank] = stop.value
            return
        held = self.held
        match operation:
            case Write(values):
                held.update(values)
                self.answers[rank] = None
            case Swap(key, old, new):
                if held.get(key, "") == old and new:
                    held[key] = new
                self.answers[rank] = held.get(key, "")
            case ReadAll(keys):
                self.answers[rank] = (
                    [held[k] for k in keys] if all(k in held for k in keys) else None
                )
            case Await(key):
                self.answers[rank] = key in held


@pytest.mark.parametrize("order", list(itertools.product(range(2), repeat=9)))
def test_no_two_ranks_end_otherwise_whoever_is_too_late_when(order):
    model = Stepped(*(share(rank, 2, "x", "ab"[rank], joined) for rank in range(2)))
    for rank in (*order, *[0, 1] * 20):
        model.step(rank)
    assert model.found[0] == model.found[1]


@pytest.mark.parametrize("healthy", range(4))
@pytest.mark.parametrize("failing", range(3))
def test_a_rank_whose_store_fails_says_so_and_all_others_end_alike(failing, healthy):
    ends = set()
    for order in itertools.product(range(3), repeat=6):
        fails = (failing, healthy)
        model = Stepped(*(share(r, 3, "x", "abc"[r], joined) for r in range(3)), fails=fails)
        for rank in (*order, *[0, 1, 2] * 20):
            model.step(rank)
        others = [model.found[rank] for rank in range(3) if rank != failing]
        assert others[0] == others[1]
        ends.add(model.found[failing])
        assert model.found[failing] in (LOST, others[0])
    assert LOST in ends


def test_what_is_adopted_and_not_there_is_no_answer():
    store = dist.HashStore()
    store.set("share/x/word", "adopted")
    with pytest.raises(StoreFailedError, match="'x' is adopted and not there"):
        run(share(1, 2, "x", "b", joined), store, "", 0.1)
