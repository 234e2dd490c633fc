"""Signals, such as Ctrl-C, that come while torch's tables are being changed: handled between two changes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class Held:
    """Signals that have come and were not handled yet, with the handlers that they are for."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def deliver(self) -> None:
        """Call the handlers, in the order in which the signals came; what one raises is raised."""
        while self.waiting:
            self.waiting.pop(0)()


@contextlib.contextmanager
def held() -> Iterator[Held]:
    """Inside, Python's handlers of signals wait for ``deliver()``, which is called once more at the end.

    Other threads than the main one are never interrupted by a handler: there, nothing is done.
    """
    found = Held()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    # Ctrl-C among the last: until its handler is back, nothing interrupts putting the others back.
    numbers = sorted(signal.valid_signals(), reverse=True)
    handlers = {number: signal.getsignal(number) for number in numbers}
    ours: dict[int, Any] = {n: handler for n, handler in handlers.items() if callable(handler)}

    def wait(number: int, frame: Any) -> None:
        found.waiting.append(partial(ours[number], number, frame))

    try:
        for number in ours:
            signal.signal(number, wait)
        yield found
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        found.deliver()
