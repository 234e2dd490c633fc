"""Who writes reports: found by entry point, so that this package knows nothing of how they look."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

REPORTER_GROUP = "inductor_passes.reporters"

# Takes the folder of option ``report``; called after each graph, once its record is published.
Reporter = Callable[[str], None]


@functools.cache
def _reporters() -> tuple[Reporter, ...]:
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group=REPORTER_GROUP))


def write(directory: str | None) -> None:
    """Bring the report in ``directory`` up to date. Whatever goes wrong costs a warning, no compile."""
    if directory is None:
        return
    try:
        writers = _reporters()
        if not writers:
            log.warning(
                "No report is written to %s: no reporter is installed. Install dynamo-dist with pip "
                "rather than through PYTHONPATH.",
                directory,
            )
        for writer in writers:
            writer(directory)
    except Exception as error:
        log.warning(
            "The report in %s could not be written (%s: %s); the compile goes on.",
            directory,
            type(error).__name__,
            error,
        )
