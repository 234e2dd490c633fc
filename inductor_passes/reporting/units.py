"""Numbers as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUS = "\N{MINUS SIGN}"
_LINE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?:: ?(?P<code>.*))?$", re.DOTALL)


def human_bytes(count: float) -> str:
    """``512 B``, ``1.5 KiB``, ``32 MiB``: powers of 1024, three digits."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_three_digits(value)} {_BINARY[unit]}"


def human_us(us: float) -> str:
    """Microseconds as ``740 ns``, ``12.5 µs``, ``1.23 ms`` or ``4.56 s``, three digits; 0 as ``0``."""
    size = abs(us)
    if size < 5e-4:
        return "0"
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "µs"), (1e6, 1e-3, "ms")):
        if size < limit:
            return f"{_three_digits(us * factor)} {unit}"
    return f"{_three_digits(us * 1e-6)} s"


def human_number(value: float) -> str:
    """Up to four significant digits, integers whole; thousands separated by thin spaces."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"


def fact_text(value: float | str | tuple[float, ...], unit: str = "") -> str:
    """A measured value with its unit; of several the first and the last."""
    if isinstance(value, str):
        return f"{value} {unit}".rstrip()
    values = value if isinstance(value, tuple) else (value,)
    ends = values[:1] + values[-1:] if len(values) > 1 else values
    if unit == "us":
        return " → ".join(map(human_us, ends)) or "none"
    if unit == "bytes":
        return " → ".join(map(human_bytes, ends)) or "none"
    return f"{' → '.join(map(human_number, ends)) or 'none'} {unit}".rstrip()


def change(before: float, after: float) -> str:
    """The change in percent, as ``+4 %`` or ``same``; "" where there is no base to compare with."""
    if before <= 0:
        return "" if after <= 0 else "new"
    share = (after - before) / before
    if abs(share) < 0.0005:
        return "same"
    percent = f"{abs(share) * 100:.1f}" if abs(share) < 0.1 else f"{abs(share) * 100:.0f}"
    return f"{'+' if share > 0 else _MINUS}{percent} %"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """``1 graph``, ``2 graphs``."""
    word = noun if count == 1 else plural or noun + "s"
    return f"{human_number(count)} {word}"


def rank_list(ranks: Sequence[int]) -> str:
    """Sorted ranks as ``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def split_line(user_line: str) -> tuple[str, str]:
    """``folder/file.py:12: code`` as (``file.py:12``, ``code``); what has another form goes first."""
    match = _LINE.match(user_line)
    if match is None:
        return user_line, ""
    name = re.split(r"[\\/]", match["file"])[-1]
    return f"{name}:{match['line']}", (match["code"] or "").strip()


def _three_digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
