"""Ranks vote on one way to run, in any interleaving: one verdict for all, and never a wait without
an end.

The ranks run the shipped steps on the model's store; a scheduler draws who takes the next one.
"""

import random

import pytest
from job_model import interleaved

from inductor_passes.ranks import coordination
from inductor_passes.ranks.coordination import ALL, DIFFERENT, NOT_ALL, unanimous


def verdicts(seed):
    """Verdicts of ranks, None for one that never comes; and what each of them can, and how."""
    rng = random.Random(seed)
    ranks = range(rng.choice((2, 3, 4)))
    can = [rng.random() < 0.8 for _ in ranks]
    hows = [rng.choice("aaaab") for _ in ranks]
    absent = {rank for rank in ranks if rng.random() < 0.1}
    found = dict.fromkeys(ranks)
    steps = {
        rank: unanimous("k", "do it", rank, ranks, can[rank], hows[rank])
        for rank in ranks
        if rank not in absent
    }
    found |= interleaved(steps, rng)
    return found, can, hows


def check(seed):
    found, can, hows = verdicts(seed)
    known = {verdict for verdict in found.values() if verdict is not None}
    assert len(known) <= 1, (found, can, hows)
    came = [rank for rank, verdict in found.items() if verdict is not None]
    if ALL in known:
        assert len(came) == len(found) and all(can) and len(set(hows)) == 1
    if DIFFERENT in known:
        assert len({hows[rank] for rank in came if can[rank]}) > 1
    return known


def test_ranks_return_one_verdict_in_any_interleaving():
    seen = {verdict for seed in range(3000) for verdict in check(seed)}
    assert seen == {ALL, NOT_ALL, DIFFERENT}


def overwrites(key, value):
    yield coordination.Write(((key, value),))
    return value


def nobody_missing(key, ranks):
    return {}
    yield


RULES = {
    "the first proposal stays": ("propose", overwrites),
    "all ranks have to vote": ("gather", nobody_missing),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_can_be_left_out(rule, monkeypatch):
    monkeypatch.setattr(coordination, *RULES[rule])
    with pytest.raises(AssertionError):
        for seed in range(3000):
            check(seed)
