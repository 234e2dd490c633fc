"""Ranks as threads that take turns: one runs until it must wait for another.

So a compile never runs beside anything else (torch traces with flags of the whole process), every
run of a program is the same run, and ranks that wait for each other are found at once, without a
clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Hang(Exception):
    """No rank can go on; the message says for what each waits."""


class Turns:
    """``size`` threads, one of which runs at a time. ``of_thread()`` is the number of the
    caller's.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._current = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._ended: dict[int, str] = {}
        self._hang: Hang | None = None
        self._thread = threading.local()

    def of_thread(self) -> int:
        return int(self._thread.rank)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What ``body(rank)`` returns, or the exception it raises, for each rank."""
        results: list[Any] = [None] * self.size
        self._waiting = {rank: (lambda: True, "its start") for rank in range(self.size)}

        def main(rank: int) -> None:
            self._thread.rank = rank
            try:
                self._take_turn(rank)
                results[rank] = body(rank)
                end = "has returned"
            except (
                BaseException
            ) as error:  # whatever it is, the other ranks must not wait for this one
                results[rank] = error
                end = f"has raised {type(error).__name__}"
            with self._changed:
                self._ended[rank] = end
                self._pass_on()

        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready()``. Raises Hang if that cannot be any more."""
        if ready():
            return
        rank = self.of_thread()
        with self._changed:
            self._waiting[rank] = (ready, what)
            self._pass_on()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._hang or self._current == rank)
            del self._waiting[rank]
            if self._hang:
                raise self._hang

    def _pass_on(self) -> None:
        for rank in (*range(self._current + 1, self.size), *range(self._current + 1)):
            if rank in self._waiting and self._waiting[rank][0]():
                self._current = rank
                break
        else:
            if self._waiting and self._hang is None:
                says = [f"rank {r} waits for {what}" for r, (_, what) in self._waiting.items()]
                says += [f"rank {r} {end}" for r, end in self._ended.items()]
                self._hang = Hang("; ".join(says))
        self._changed.notify_all()
