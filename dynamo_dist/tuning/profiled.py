"""Timed steps of graphs on CUDA under torch.profiler, read back as marks of their calls."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamo_dist.torch_compat import profiling
from inductor_passes.attach.clocked import Way
from inductor_passes.errors import TopologyError
from inductor_passes.machine.importing import kineto_calls
from inductor_passes.tuning.layout import CodeLayout
from inductor_passes.tuning.profile import UnreadCallError, marks_of, shares_of

_FILE = "of a timed step"


class Profiler:
    """torch.profiler around one step of this rank."""

    def __init__(self) -> None:
        self._on: Any = None

    def wait(self) -> None:
        """Wait for all that the device has been given."""
        torch.cuda.synchronize()

    def range_of(self, name: str) -> AbstractContextManager[object]:
        """A range that the profile shows."""
        return torch.profiler.record_function(name)

    def start(self) -> None:
        """Profile from now on. Raises RuntimeError where the program profiles itself."""
        if profiling.is_profiling():
            raise RuntimeError("the program's own profiler is on")
        self.wait()
        activities = torch.profiler.ProfilerActivity
        made = torch.profiler.profile(activities=[activities.CPU, activities.CUDA])
        made.start()
        self._on = made

    def stop(self) -> Any:
        """End it; returns what ``export_chrome_trace`` writes, or None if nothing was profiled."""
        made, self._on = self._on, None
        if made is None:
            return None
        self.wait()
        made.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "step.json")
            made.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return json.load(file)


@dataclass(slots=True)
class ProfiledCalls:
    """Calls of one graph in the profiles of steps, as far as they can be read.

    ``marks``: by way, as ``ClockedCode.calls``, of the device's clock. ``shares``: of each call whose launches were waited for at once,
    microseconds of nodes by name. ``why_not``: what could not be read first.
    """

    layout: CodeLayout
    marks: dict[Way, list[list[float]]] = field(default_factory=dict)
    shares: list[dict[str, float]] = field(default_factory=list)
    why_not: str = ""

    def read(self, way: Way, ran: int, calls: Sequence[kineto_calls.Call]) -> None:
        """Take the profiled calls of a step in which the graph was called ``ran`` times."""
        if self.why_not:
            return
        if len(calls) != ran:
            self.why_not = f"the profile shows {len(calls)} of {ran} calls"
            return
        try:
            for call in calls:
                marks = marks_of(self.layout, call, alone=way == "alone")
                self.marks.setdefault(way, []).append(marks)
                if way == "alone":
                    self.shares.append(shares_of(self.layout, call))
        except UnreadCallError as error:
            self.why_not = str(error)


def calls_of(trace: Any) -> dict[int, list[kineto_calls.Call]]:
    """Marked calls of a step's profile by number of the graph. Raises TopologyError for what is no profile."""
    if trace is None:
        raise TopologyError("The step was not profiled.", "", "")
    found: dict[int, list[kineto_calls.Call]] = {}
    for call in kineto_calls.calls(trace, _FILE):
        found.setdefault(call.graph, []).append(call)
    return found
