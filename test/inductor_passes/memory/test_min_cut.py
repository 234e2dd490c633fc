"""The choice of what to keep is the cheapest of all."""

import itertools
import random

import pytest

from inductor_passes.memory.min_cut import Value, cheapest

WEIGHTS = {"compute": 1.0, "link": 0.25}


def drawn(rng, count):
    values = []
    for i in range(count):
        sources = tuple(j for j in range(max(0, i - 3), i) if rng.random() < 0.6)
        size = None if rng.random() < 0.15 else rng.randint(0, 9)
        channel = rng.choice(("compute", "compute", "link"))
        us = None if size is not None and rng.random() < 0.2 else {channel: rng.randint(0, 9)}
        values.append(Value(sources, size, us, rng.random() < 0.4))
    return values


def cost_of(values, kept, byte_us):
    """What it costs to keep some values and run again what else is needed; None if it cannot be."""
    again, pending = set(), [i for i, value in enumerate(values) if value.read]
    total = sum(byte_us * values[i].bytes for i in kept)
    while pending:
        i = pending.pop()
        if i in kept or i in again:
            continue
        if values[i].us is None:
            return None
        again.add(i)
        pending.extend(values[i].sources)
    return total + sum(WEIGHTS[name] * us for i in again for name, us in values[i].us.items())


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_is_cheaper(seed):
    rng = random.Random(seed)
    values, byte_us = drawn(rng, 9), rng.choice((0.1, 0.7, 1.0, 4.0))
    keepable = [i for i, value in enumerate(values) if value.bytes is not None]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(keepable, size) for size in range(len(keepable) + 1)
    )
    costs = [cost_of(values, set(kept), byte_us) for kept in subsets]
    found = cheapest(values, WEIGHTS, byte_us)
    best = min(cost for cost in costs if cost is not None)
    assert found.worth(WEIGHTS, byte_us) == pytest.approx(best, abs=1e-4)
    assert cost_of(values, found.kept, byte_us) == pytest.approx(best, abs=1e-4)


def test_dear_memory_is_not_used():
    chain = [Value((), 8, {"compute": 1.0}, False), Value((0,), 8, {"compute": 1.0}, True)]
    assert cheapest(chain, WEIGHTS, 1e-9).kept == {1}
    dear = cheapest(chain, WEIGHTS, 10.0)
    assert not dear.kept and dear.again == {0, 1} and dear.us == {"compute": 2.0}


def test_value_that_cannot_be_had_is_an_error():
    with pytest.raises(ValueError, match="neither be kept nor computed again"):
        cheapest([Value((), None, None, True)], WEIGHTS, 1.0)
