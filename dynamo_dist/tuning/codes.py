"""Compiled graphs of this process that launch, with the clocks that can be put into their code."""

from __future__ import annotations

import functools
import statistics
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.inductor import code
from dynamo_dist.tuning.profiled import ProfiledCalls, Profiler, calls_of
from inductor_passes.attach.clocked import ClockedCode, Way, clocked
from inductor_passes.attach.marks import ProfiledMarks
from inductor_passes.machine.importing.kineto_calls import Call
from inductor_passes.records import GraphRecord
from inductor_passes.reporting.recorder import PREFIX, load_record
from inductor_passes.reporting.subscribers import Subscribers
from inductor_passes.torch_compat.c10d import real_group_ranks
from inductor_passes.tuning.layout import CodeLayout, layout_of
from inductor_passes.tuning.merge import RankCalls
from inductor_passes.tuning.table import GraphCalls


@dataclass(slots=True)
class Noted:
    """A graph's function, the source of its code, and the name of its record, which is there by its first call.

    ``runs``: on ``cpu`` or ``cuda``, or in a ``cuda graph``.
    """

    owner: weakref.ref[Any]
    call: Callable[..., Any]
    source: str
    record: str
    runs: str = "cpu"

    def load(self) -> GraphRecord | None:
        """The record; None where there is none."""
        return load_record(self.record) if self.record else None


WAYS: tuple[Way, Way] = ("alone", "scheduled")
_noted: list[Noted] = []
_compiled = 0
# Takes each graph that launches as it is made or loaded; returns the function that ends it.
_subscribers: Subscribers[Noted] = Subscribers()
subscribe = _subscribers.add


def changes() -> list[Change]:
    """List the changes that enabling makes: code of graphs that is made or loaded is noted, to be timed on request."""
    return code.note_compiled_code(_note)


def _note(
    owner: object, call: Callable[..., Any], source: str, counted: Iterable[str], runs: str
) -> None:
    global _compiled  # noqa: PLW0603 - of this process
    _compiled += 1
    _noted[:] = [each for each in _noted if each.owner() is not None]
    if "_c10d_functional" in source:
        record = next(
            (name.removeprefix(PREFIX) for name in counted if name.startswith(PREFIX)), ""
        )
        _noted.append(Noted(weakref.ref(owner), call, source, record, runs))
        _subscribers.call(_noted[-1])


def compiles() -> int:
    """Graphs that were compiled, or loaded from a cache, so far."""
    return _compiled


class Clocks:
    """Clocks on all graphs of the process that launch between ranks; ``stop`` takes them off.

    Graphs on CUDA are clocked with a ``profiler`` alone: each step that is timed then is a profile of its own, read as
    it ends. ``left``: a line for each graph there that cannot be timed at all.
    """

    def __init__(self, profiler: Profiler | None = None) -> None:
        self._on: list[tuple[ClockedCode, GraphRecord]] = []
        self._calls: dict[int, dict[Way, list[list[float]]]] = {}
        self._profiled: dict[int, ProfiledCalls] = {}
        self._profiler = profiler
        self._not_profiled = ""
        self.left: list[str] = []
        seen: set[int] = set()
        for each in _noted:
            if each.owner() is None or (each.runs != "cpu" and profiler is None):
                continue
            record = each.load()
            made = clocked(each.call, each.source) if record is not None and record.graph else None
            if each.runs != "cpu" and made is None and record is not None and record.collectives:
                self.left.append(
                    f"graph {record.graph_id} is not timed: its code is of no known form"
                )
            if made is None or record is None or id(made.function) in seen:
                continue
            seen.add(id(made.function))
            if each.runs != "cpu":
                layout, why = _profilable(each, record, made)
                if layout is None:
                    self.left.append(f"graph {record.graph_id} is not timed: {why}")
                    continue
                self._profiled[len(self._on)] = ProfiledCalls(layout)
            self._on.append((made, record))
        if self._profiled:  # the first profile of a process takes long
            self._start_profiler()
            self._stop_profiler()

    @property
    def is_profiling(self) -> bool:
        """Return whether a graph runs on CUDA, so that timed steps are profiled."""
        return bool(self._profiled)

    def wait(self) -> None:
        """Wait for the device, if a graph runs there."""
        if self._profiled and self._profiler is not None:
            self._profiler.wait()

    def start(
        self, way: Way, place: str = "", ended: Callable[[list[float]], None] | None = None
    ) -> None:
        """Time calls from now on. Sends and receives are waited for where the code does: partners wait for both.

        ``ended``: called as a call of a graph at ``place`` ends that is no backward one.
        """
        if self._profiled:
            self._start_profiler()
        for number, (made, record) in enumerate(self._on):
            here = bool(place) and record.place == place and record.phase != "backward"
            way_here: Way = "scheduled" if _is_one_sided(record) else way
            if number in self._profiled and self._profiler is not None:
                marks = functools.partial(
                    ProfiledMarks, number, len(made.events), self._profiler.range_of
                )
                made.start(way_here, opened=marks)
            else:
                made.start(way_here, ended if here else None)

    def stop(self, way: Way) -> None:
        """Take the clocks off and note what they showed."""
        found = self._stop_profiler() if self._profiled else {}
        for number, (made, _) in enumerate(self._on):
            calls = made.stop()
            profiled = self._profiled.get(number)
            if profiled is None:
                self._calls.setdefault(number, {}).setdefault(way, []).extend(calls)
                continue
            if calls and self._not_profiled:
                profiled.why_not = profiled.why_not or self._not_profiled
            profiled.read(way, len(calls), found.get(number, ()))
            self._calls[number] = profiled.marks

    def _start_profiler(self) -> None:
        assert self._profiler is not None
        try:
            self._profiler.start()
        except Exception as error:  # of torch, or CUPTI: the step goes on
            self._cannot_profile(error)

    def _stop_profiler(self) -> Mapping[int, list[Call]]:
        assert self._profiler is not None
        try:
            return calls_of(self._profiler.stop())
        except Exception as error:  # of torch, CUPTI, or the file
            self._cannot_profile(error)
            return {}

    def _cannot_profile(self, error: Exception) -> None:
        said = str(error).partition("\n")[0]
        self._not_profiled = self._not_profiled or f"torch.profiler failed: {said}"

    def calls(self) -> list[GraphCalls]:
        """Calls of each graph that ran, by the way in which it launched."""
        found = []
        for number, (made, record) in enumerate(self._on):
            calls = self._calls.get(number, {})
            alone, scheduled = (tuple(calls.get(way, ())) for way in ("alone", "scheduled"))
            profiled = self._profiled.get(number)
            why_not = profiled.why_not if profiled is not None else ""
            if alone or scheduled or why_not:
                members = tuple(real_group_ranks(c.group_name) or () for c in record.collectives)
                shares = _medians(profiled.shares) if profiled is not None else {}
                ran = RankCalls(alone, scheduled, members, shares)
                found.append(GraphCalls(record, made.events, ran, why_not))
        return found

    def us(self, way: Way) -> dict[str, list[float]]:
        """Microseconds of whole calls by graph, of those that ran."""
        return {
            record.graph: [1e6 * (marks[-1] - marks[0]) for marks in calls]
            for record, calls in self._ran(way)
        }

    def records(self) -> list[GraphRecord]:
        """Records of the graphs that ran as scheduled: not of code that was compiled again since."""
        return [record for record, _ in self._ran("scheduled")]

    def predicted_us(self) -> dict[str, float]:
        """Predicted time of a call of each graph that ran as scheduled."""
        return {record.graph: record.after.makespan_us for record in self.records()}

    def _ran(self, way: Way) -> list[tuple[GraphRecord, list[list[float]]]]:
        found = []
        for number, (_, record) in enumerate(self._on):
            if calls := self._calls.get(number, {}).get(way):
                found.append((record, calls))
        return found


def _is_one_sided(record: GraphRecord) -> bool:
    return any(not collective.agreed() for collective in record.collectives)


def _profilable(
    noted: Noted, record: GraphRecord, made: ClockedCode
) -> tuple[CodeLayout | None, str]:
    """Where the nodes of a graph on CUDA are in its code; None, and why, where a profile cannot tell."""
    if noted.runs == "cuda graph":
        return None, "a CUDA graph replays it, and its code does not run"
    if _is_one_sided(record):
        return None, "it sends or receives, on CUDA"
    found = layout_of(record.nodes, made.events)
    return found, "" if found is not None else "its code launches in another order than the graph"


def _medians(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in shares for name in each}
    return {name: statistics.median(each.get(name, 0.0) for each in shares) for name in names}
