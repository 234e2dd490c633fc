"""Writers of the reports of ``options={"report": DIR}``: ours, and those of other packages, by entry point."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable

from inductor_passes.reporting.live import live_graphs

log = logging.getLogger(__name__)

REPORTER_GROUP = "inductor_passes.reporters"

# Takes the folder of option ``report``, starts to listen, and returns what brings the folder up to
# date; that is called after each graph, once its record is published.
Reporter = Callable[[str], Callable[[], object]]

_own: Reporter = live_graphs
_open: dict[str, list[Callable[[], object]]] = {}


def use(reporter: Reporter) -> Reporter:
    """Write reports that are begun from now on by ``reporter``, which knows more of a run; returns the one before."""
    global _own
    before, _own = _own, reporter
    return before


@functools.cache
def _others() -> tuple[Reporter, ...]:
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group=REPORTER_GROUP))


def start(directory: str | None) -> None:
    """Let reporters listen from now on for the report in ``directory``; once for each folder."""
    if directory is None:
        return
    folder = os.path.abspath(directory)
    if folder in _open:
        return
    _open[folder] = [_own(folder)]
    try:
        _open[folder] += [reporter(folder) for reporter in _others()]
    except Exception as error:
        _warn(folder, error)


def write(directory: str | None) -> None:
    """Bring the report in ``directory`` up to date. Whatever goes wrong costs a warning, no compile."""
    if directory is None:
        return
    start(directory)
    folder = os.path.abspath(directory)
    for refresh in _open[folder]:
        try:
            refresh()
        except Exception as error:
            _warn(folder, error)


def _warn(folder: str, error: Exception) -> None:
    log.warning(
        "The report in %s could not be written (%s: %s); the compile goes on.",
        folder,
        type(error).__name__,
        error,
    )
