"""Functions that are called with each record of a kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class Subscribers(Generic[T]):
    """Callbacks, in the order in which they came. Any thread may add, end and call."""

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[T], object]] = {}

    def add(self, callback: Callable[[T], object]) -> Callable[[], object]:
        """Call ``callback`` with every later record; returns the function that ends it."""
        token = object()
        self._callbacks[token] = callback
        return lambda: self._callbacks.pop(token, None)

    def call(self, record: T) -> None:
        """Hand a record to every callback. One that raises is logged and does not stop the compile."""
        for callback in list(self._callbacks.values()):
            try:
                callback(record)
            except Exception:
                log.exception("A subscriber of records raised; the compile goes on.")
