"""The writer of the reports of ``options={"report": DIR}``: that of graphs alone, or one that knows more of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from inductor_passes.reporting.live import live_graphs

log = logging.getLogger(__name__)

# Takes the folder of option ``report``, starts to listen, and returns what brings the folder up to
# date; that is called after each graph, once its record is published.
Reporter = Callable[[str], Callable[[], object]]

_own: Reporter = live_graphs
_open: dict[str, Callable[[], object]] = {}


def use(reporter: Reporter) -> Reporter:
    """Write reports that are begun from now on by ``reporter``, which knows more of a run; returns the one before."""
    global _own
    before, _own = _own, reporter
    return before


def start(directory: str | None) -> None:
    """Let the reporter listen from now on for the report in ``directory``; once for each folder."""
    if directory is None:
        return
    folder = os.path.abspath(directory)
    if folder not in _open:
        _open[folder] = _own(folder)


def write(directory: str | None) -> None:
    """Bring the report in ``directory`` up to date. Whatever goes wrong costs a warning, no compile."""
    if directory is None:
        return
    start(directory)
    folder = os.path.abspath(directory)
    try:
        _open[folder]()
    except Exception as error:
        log.warning(
            "The report in %s could not be written (%s: %s); the compile goes on.",
            folder,
            type(error).__name__,
            error,
        )
