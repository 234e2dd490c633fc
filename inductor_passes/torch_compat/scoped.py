"""Functions of torch that are others while a block runs, for the thread that runs it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = threading.Lock()
_places: dict[tuple[Any, str], _Place] = {}


class _Place:
    """A function that some threads wrap now."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.found = vars(owner)[name]
        is_bound = isinstance(self.found, (staticmethod, classmethod))
        self.upstream = getattr(owner, name) if is_bound else self.found
        self.blocks: list[tuple[int, Wrap]] = []

        @functools.wraps(self.upstream)
        def call(*args: Any, **kwargs: Any) -> Any:
            function, here = self.upstream, threading.get_ident()
            for thread, wrap in tuple(self.blocks):
                if thread == here:
                    function = wrap(function)
            return function(*args, **kwargs)

        self.ours = staticmethod(call) if is_bound else call
        setattr(owner, name, self.ours)

    def restore(self) -> None:
        if vars(self.owner)[self.name] is self.ours:  # else somebody has wrapped it since
            setattr(self.owner, self.name, self.found)


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Have this thread call ``wrap(upstream)`` in place of ``owner.name`` in the block; without
    such a function, nothing.
    """
    if name not in vars(owner):
        yield
        return
    key, block = (owner, name), (threading.get_ident(), wrap)
    with _lock:
        if (place := _places.get(key)) is None:
            place = _places[key] = _Place(owner, name)
        place.blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            place.blocks.remove(block)
            if not place.blocks:
                place.restore()
                del _places[key]
