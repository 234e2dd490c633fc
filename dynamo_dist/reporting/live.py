"""Breaks, recompiles and plans while the plugin is on: logged, and in the report of ``options={"report": DIR}``.

Graph breaks happen before a backend is first called, so they are listened for from ``enable()`` on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Callable

from dynamo_dist.reporting import plans
from dynamo_dist.reporting.collect import Collector
from dynamo_dist.reporting.logs import log_decision
from dynamo_dist.reporting.write import write_report
from dynamo_dist.torch_compat.dynamo_watching import PLACES, watch_dynamo
from inductor_passes.report import recorder, report
from inductor_passes.report.report import LiveReport


@functools.cache
def process_run() -> Collector:
    """What this process has met while enabled, and its graphs since a report was first asked for."""
    return Collector(on_change=log_decision)


@functools.cache
def _with_graphs() -> Collector:
    collector = process_run()
    recorder.subscribe(collector.take)
    return collector


def live_report(directory: str) -> Callable[[], object]:
    """Start to listen; the function returned brings ``directory`` up to date."""
    return LiveReport(directory, _with_graphs().report, write_report).refresh


class Listen:
    """A change of the plugin's switch: breaks, recompiles and plans are seen while enabled."""

    name = "listening"
    of = PLACES

    def apply(self) -> None:
        self._listening = contextlib.ExitStack()
        seen = process_run()
        self._listening.enter_context(watch_dynamo(seen.on_break, seen.on_compile))
        self._listening.callback(plans.subscribe(seen.take))
        self._listening.callback(report.use, report.use(live_report))
        atexit.register(self._listening.close)  # while there still is something to close it with

    def undo(self) -> None:
        atexit.unregister(self._listening.close)
        self._listening.close()
