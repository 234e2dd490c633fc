"""The report of ``options={"report": DIR}``: kept up to date while the process compiles.

Graph breaks happen before a backend is first called, so a process-wide collector listens from
``enable()`` on; for those who keep stock trackers, from ``inductor_passes.options(report=...)`` on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from dynamo_dist.reporting.collect import Collector, collect
from dynamo_dist.reporting.write import write_report

_lock = threading.Lock()
_listening = contextlib.ExitStack()
_collector: Collector | None = None


def listen() -> Collector:
    """The process-wide collector, started if it is not on."""
    global _collector  # noqa: PLW0603 - one for the process
    with _lock:
        if _collector is None:
            _collector = _listening.enter_context(collect())
        return _collector


def stop() -> None:
    """Stop listening and forget; a report that is written later starts anew."""
    global _collector  # noqa: PLW0603
    with _lock:
        _collector = None
        _listening.close()


def live_report(directory: str) -> Callable[[], object]:
    """Start to listen; the function returned writes everything seen so far to ``directory``."""
    listen()

    def refresh() -> object:
        return write_report(listen().report(), directory)

    return refresh


class Listening:
    """``listen()`` as a change of the plugin's switch: on with ``enable()``, off with ``disable()``."""

    name = "listening"

    def apply(self) -> None:
        listen()

    def undo(self) -> None:
        stop()
