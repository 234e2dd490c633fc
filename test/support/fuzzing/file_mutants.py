"""Files that are not well formed, made of ones that are: by the value, and by the byte.

Equal seeds give equal mutants.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from typing import Any

# Stand for what json.dumps would not write, or not in this time.
_DEEP, _LONG, _SURROGATE = "@deep@", "@long@", "@half@"
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, -0.5, 2**31, 2**63, 10**18, 10**19, 10**400, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), "", " ", "x", "0", "-1", "1e9", "R", "all_gather", "\0", "a\nb", "é\N{BUG}" * 9,
    [], {}, [None], [[]], [0, 0], {"": 0}, [1e9] * 9, _DEEP, _LONG, _SURROGATE,
)  # fmt: skip


def mutant(text: str, draw: random.Random) -> bytes:
    """One mutant of a file's text; of JSON mostly a value is changed, else bytes are."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if values is None or draw.random() < 0.2:
        return _bytes(text.encode(), draw)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        values = _value(values, draw)
    changed = json.dumps(values).replace(f'"{_DEEP}"', "[" * 10**5 + "]" * 10**5)
    changed = changed.replace(f'"{_LONG}"', "9" * 10**4).replace(_SURROGATE, r"\ud800")
    return changed.encode()


def _value(values: Any, draw: random.Random) -> Any:
    """The same with one place changed: another value, nothing, a thing twice, another name."""
    places = list(_places(values))
    if not places:
        return draw.choice(ODD)
    values = copy.deepcopy(values)
    path = draw.choice(places)
    at = values
    for key in path[:-1]:
        at = at[key]
    key = path[-1]
    how = draw.random()
    if how < 0.5:
        at[key] = copy.deepcopy(draw.choice(ODD))
    elif how < 0.65:
        del at[key]
    elif how < 0.75 and isinstance(at, list):
        at.insert(draw.randrange(len(at) + 1), copy.deepcopy(at[key]))
    elif how < 0.85 and isinstance(at[key], (int, float)):
        at[key] = at[key] * draw.choice((-1, 0, 1e12, 1e-12, 10**9))
    elif how < 0.9 and isinstance(at, list):
        draw.shuffle(at)
    elif isinstance(at, dict):
        at[draw.choice(("", "schema", "name", f"{key}_", "\n"))] = at.pop(key)
    else:
        at[key] = copy.deepcopy(_at(values, draw.choice(places)))
    return values


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _places(values: Any, path: tuple[Any, ...] = ()) -> Any:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*path, key))


def _bytes(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 4, 64, 4096)))
    ways = (
        lambda: data[:start],
        lambda: data[:start] + data[end:],
        lambda: data[:end] + data[start:],
        lambda: data[:start] + bytes([draw.randrange(256)]) + data[start + 1 :],
        lambda: data[:start] + draw.randbytes(end - start) + data[end:],
        lambda: data[:start] + b" -1 nan 1e999 \xff 0x 9" + data[start:],
        lambda: data[:start] + b"9" * 5000 + data[start:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode().encode("utf-16"),
        lambda: b"[" * 10**6,
        lambda: b'{"a":' * 10**6,
        lambda: gzip.compress(data),
        lambda: gzip.compress(data)[:-9],
        lambda: gzip.compress(data) + data,
        lambda: gzip.compress(b"") * 500,
        lambda: b"\x1f\x8b" + data,
        lambda: b"",
        lambda: draw.randbytes(99),
        lambda: b"\n" * 10**6,
    )
    return draw.choice(ways)()
