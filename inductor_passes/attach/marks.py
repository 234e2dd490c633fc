"""Marks of a call of clocked code that stand in a profile too, so that it says which event started what on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from inductor_passes.machine.importing.kineto_calls import CALL, EVENT

Range = Callable[[str], AbstractContextManager[object]]


class ProfiledMarks(list[float]):
    """Seconds as ``ClockedCode`` appends them; the call, and each event in it, is a range of the profile meanwhile.

    ``number``: of the graph. ``events``: how many its code has. ``range_of(name)``: a range, ``torch.profiler.record_function``.
    """

    def __init__(self, number: int, events: int, range_of: Range) -> None:
        super().__init__()
        self._last, self._range_of = 1 + 2 * events, range_of
        self._open: list[AbstractContextManager[object]] = []
        self._enter(f"{CALL}{number}")

    def append(self, seconds: float, /) -> None:
        """Take the beginning of the call, before and after each event in turn, and the end."""
        at = len(self)
        super().append(seconds)
        if at == self._last or (at and at % 2 == 0):
            self._open.pop().__exit__(None, None, None)
        elif at:
            self._enter(f"{EVENT}{at // 2}")

    def _enter(self, name: str) -> None:
        made = self._range_of(name)
        made.__enter__()
        self._open.append(made)
