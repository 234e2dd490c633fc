import math

import sympy
from hypothesis import given
from hypothesis import strategies as st

from inductor_passes.machine.prices.amount import (
    Amount,
    ceiling,
    expr_of,
    largest,
    log2,
    size_symbol,
    smallest,
)

a, b = size_symbol("a"), size_symbol("b")
numbers = st.integers(1, 50)


def at(amount, x, y):
    return float(expr_of(amount).subs({a: x, b: y}))


@given(numbers, numbers)
def test_the_formula_has_the_value(x, y):
    p, q = Amount(x, a), Amount(y, b)
    made = [
        p + q, 3 - p, p - 3, 2 * p / q, 5 / q, math.prod([p, q, 4]), sum([p, q, 1.5]),
        largest(p, q, 7), smallest(p, 7), ceiling(p / 4), log2(p),
    ]  # fmt: skip
    for amount in made:
        assert isinstance(amount, Amount)
        assert math.isclose(at(amount, x, y), float(amount))


def test_numbers_stay_numbers():
    assert largest(2, 3) == 3
    assert type(largest(2, 3)) is int
    assert ceiling(2.5) == 3
    assert expr_of(2) == sympy.Integer(2)
