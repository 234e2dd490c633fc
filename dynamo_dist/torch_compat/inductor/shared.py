"""Inductor's look into its cache, for graphs that one rank compiles for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dynamo_dist.torch_compat.changes import Change, WrapAttribute, has


def look_again(missed: Callable[[str], bool]) -> list[Change]:
    """Have Inductor look into its cache once more, where another rank has put the graph there meanwhile.

    ``missed`` gets the key of a graph that is not there, and says whether to look once more. ``FxGraphCache.load_with_key`` was seen in 2.13 and 2.14.
    """
    from torch._inductor.codecache import FxGraphCache

    name = "load_with_key"
    if not has(FxGraphCache, name, off='compile="shared" compiles on every rank'):
        return []

    def changed(stock: Callable[..., Any]) -> Any:
        @functools.wraps(stock)
        def load_with_key(key: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            found: tuple[Any, Any] = stock(key, *args, **kwargs)
            if found[0] is None and missed(key):
                found = stock(key, *args, **kwargs)
            return found

        load_with_key.dist_looks_again = True  # type: ignore[attr-defined]
        return staticmethod(load_with_key)

    return [WrapAttribute(FxGraphCache, name, changed)]
