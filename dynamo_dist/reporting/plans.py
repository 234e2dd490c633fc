"""Decisions of the planner, from where they are made to whoever reports them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dynamo_dist.reporting.records import PlanRecord

_lock = threading.Lock()
_subscribers: list[Callable[[PlanRecord], object]] = []


def subscribe(callback: Callable[[PlanRecord], object]) -> Callable[[], None]:
    """Call ``callback`` with every later plan, made or found again; returns the function that ends it."""
    with _lock:
        _subscribers.append(callback)

    def unsubscribe() -> None:
        with _lock:
            _subscribers.remove(callback)

    return unsubscribe


def publish(record: PlanRecord) -> None:
    """Hand a plan to every subscriber."""
    with _lock:
        targets = list(_subscribers)
    for target in targets:
        target(record)
