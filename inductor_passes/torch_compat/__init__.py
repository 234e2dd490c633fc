"""Hold all uses of private names of torch, by subsystem, each with a feature probe.

A docstring says in which versions a name was seen. The code here knows how to look into torch, not
when or why.

``wrapped`` replaces a function of torch for one thread, while a block runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

# A function of torch's, whose signature differs from version to version.
TorchFunction = Callable[..., Any]
Wrap = Callable[[TorchFunction], TorchFunction]

_lock = threading.Lock()
# By the owner and the name; the last block of a function takes it out.
_wrapped_now: dict[tuple[object, str], _WrappedFunction] = {}


class _WrappedFunction:
    """A function that some threads wrap now.

    One replacement serves all threads, and asks at each call which blocks its own thread is in: a
    second thread that compiles meanwhile runs upstream's function.
    """

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name
        self.found = vars(owner)[name]
        # ``vars`` has the descriptor: put back as it was, a static method stays one.
        is_bound = isinstance(self.found, (staticmethod, classmethod))
        self.upstream = getattr(owner, name) if is_bound else self.found
        self.blocks: list[tuple[int, Wrap]] = []

        @functools.wraps(self.upstream)
        def call(*args: object, **kwargs: object) -> object:
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
def wrapped(owner: object, name: str, wrap: Wrap) -> Iterator[None]:
    """Have this thread call ``wrap(upstream)`` in place of ``owner.name`` in the block; without
    such a function, nothing.
    """
    if name not in vars(owner):
        yield
        return
    key, block = (owner, name), (threading.get_ident(), wrap)
    with _lock:
        if (wrapped_function := _wrapped_now.get(key)) is None:
            wrapped_function = _wrapped_now[key] = _WrappedFunction(owner, name)
        wrapped_function.blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            wrapped_function.blocks.remove(block)
            if not wrapped_function.blocks:
                wrapped_function.restore()
                del _wrapped_now[key]
