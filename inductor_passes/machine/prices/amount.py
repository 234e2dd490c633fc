"""A number that knows the formula it comes from, so that what is computed with hints can be read as a formula.

``Amount`` takes part in arithmetic as its value does, and carries a sympy expression along: hints are
substituted last. What is decided by comparing amounts (which values share a kernel) is decided by their values.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import sympy

from inductor_passes.torch_compat import sizes


class Amount(float):
    """A value, and the sympy expression of symbols that stands for it. Immutable."""

    expr: sympy.Expr

    def __new__(cls, value: float, expr: sympy.Expr) -> Amount:
        made = super().__new__(cls, value)
        made.expr = expr
        return made

    def __add__(self, other: Any) -> Any:
        return Amount(float(self) + float(other), self.expr + expr_of(other))

    def __sub__(self, other: Any) -> Any:
        return Amount(float(self) - float(other), self.expr - expr_of(other))

    def __rsub__(self, other: Any) -> Any:
        return Amount(float(other) - float(self), expr_of(other) - self.expr)

    def __mul__(self, other: Any) -> Any:
        return Amount(float(self) * float(other), self.expr * expr_of(other))

    def __truediv__(self, other: Any) -> Any:
        return Amount(float(self) / float(other), self.expr / expr_of(other))

    def __rtruediv__(self, other: Any) -> Any:
        return Amount(float(other) / float(self), expr_of(other) / self.expr)

    __radd__ = __add__
    __rmul__ = __mul__


def expr_of(number: Any) -> sympy.Expr:
    """The formula of an amount; of any other number, that number."""
    return number.expr if isinstance(number, Amount) else sympy.sympify(number)


def largest(*numbers: float) -> float:
    """``max``, whose formula is the maximum of the formulas."""
    return _chosen(max, sympy.Max, numbers)


def smallest(*numbers: float) -> float:
    """``min``, whose formula is the minimum of the formulas."""
    return _chosen(min, sympy.Min, numbers)


def ceiling(number: float) -> float:
    """The next whole number, as an int unless it is an amount."""
    if isinstance(number, Amount):
        return Amount(math.ceil(float(number)), sympy.ceiling(number.expr))
    return math.ceil(number)


def log2(number: float) -> float:
    """The logarithm to base 2."""
    if isinstance(number, Amount):
        return Amount(math.log2(float(number)), sympy.log(number.expr, 2))
    return math.log2(number)


def _chosen(choose: Callable[..., Any], formula: Any, numbers: tuple[float, ...]) -> float:
    for number in numbers:  # a plain loop: schedulers ask often
        if type(number) is Amount:
            return Amount(choose(map(float, numbers)), _made(formula, *map(expr_of, numbers)))
    return cast(float, choose(numbers))


@functools.cache
def _made(formula: Any, *exprs: sympy.Expr) -> sympy.Expr:
    return formula(*exprs)  # sympy thinks long about it, and layers ask for the same again


@dataclass
class Sizes:
    """The symbols that were met: what each had for a value while tracing, and where it is from."""

    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    sources: dict[sympy.Symbol, str] = field(default_factory=dict)


def size_symbol(name: str) -> sympy.Symbol:
    """A symbol for a size: a whole number above zero, as far as formulas are simplified."""
    return sympy.Symbol(name, integer=True, positive=True)


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[Sizes]:
    """Within it, symbolic sizes are read as amounts; yields what becomes known of their symbols."""
    found = Sizes()

    def read(expr: sympy.Expr, hint: int, sources: Mapping[sympy.Symbol, str]) -> Amount:
        positive = {symbol: size_symbol(symbol.name) for symbol in sources}
        found.sources.update((positive[symbol], source) for symbol, source in sources.items())
        amount = Amount(hint, expr.xreplace(positive))
        if amount.expr.is_Symbol:
            found.hints[amount.expr] = hint
        return amount

    with sizes.sizes_read_by(read):
        yield found
