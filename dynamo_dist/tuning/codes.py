"""Compiled graphs of this process that launch, with the clocks that can be put into their code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.inductor import code
from inductor_passes.attach.clocked import ClockedCode, Way, clocked
from inductor_passes.records import GraphRecord
from inductor_passes.reporting.recorder import PREFIX, load_record
from inductor_passes.reporting.subscribers import Subscribers
from inductor_passes.torch_compat.c10d import real_group_ranks
from inductor_passes.tuning.merge import RankCalls
from inductor_passes.tuning.table import GraphCalls


@dataclass(slots=True)
class Noted:
    """A graph's function, the source of its code, and the name of its record, which is there by its first call."""

    owner: weakref.ref[Any]
    call: Callable[..., Any]
    source: str
    record: str

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


def _note(owner: object, call: Callable[..., Any], source: str, counted: Iterable[str]) -> None:
    global _compiled  # noqa: PLW0603 - of this process
    _compiled += 1
    _noted[:] = [each for each in _noted if each.owner() is not None]
    if "_c10d_functional" in source:
        record = next(
            (name.removeprefix(PREFIX) for name in counted if name.startswith(PREFIX)), ""
        )
        _noted.append(Noted(weakref.ref(owner), call, source, record))
        _subscribers.call(_noted[-1])


def compiles() -> int:
    """Graphs that were compiled, or loaded from a cache, so far."""
    return _compiled


class Clocks:
    """Clocks on all graphs of the process that launch between ranks; ``stop`` takes them off."""

    def __init__(self) -> None:
        self._on: list[tuple[ClockedCode, GraphRecord]] = []
        self._calls: dict[int, dict[Way, list[list[float]]]] = {}
        seen: set[int] = set()
        for each in _noted:
            record = each.load() if each.owner() is not None else None
            made = clocked(each.call, each.source) if record is not None and record.graph else None
            if made is None or record is None or id(made.function) in seen:
                continue
            seen.add(id(made.function))
            self._on.append((made, record))

    def start(
        self, way: Way, place: str = "", ended: Callable[[list[float]], None] | None = None
    ) -> None:
        """Time calls from now on. Sends and receives are waited for where the code does: partners wait for both.

        ``ended``: called as a call of a graph at ``place`` ends that is no backward one.
        """
        for made, record in self._on:
            one_sided = any(not c.agreed() for c in record.collectives)
            here = bool(place) and record.place == place and record.phase != "backward"
            made.start("scheduled" if one_sided else way, ended if here else None)

    def stop(self, way: Way) -> None:
        """Take the clocks off and note what they showed."""
        for number, (made, _) in enumerate(self._on):
            self._calls.setdefault(number, {}).setdefault(way, []).extend(made.stop())

    def calls(self) -> list[GraphCalls]:
        """Calls of each graph that ran, by the way in which it launched."""
        found = []
        for number, (made, record) in enumerate(self._on):
            calls = self._calls.get(number, {})
            alone, scheduled = (tuple(calls.get(way, ())) for way in ("alone", "scheduled"))
            if alone or scheduled:
                members = tuple(real_group_ranks(c.group_name) or () for c in record.collectives)
                found.append(GraphCalls(record, made.events, RankCalls(alone, scheduled, members)))
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
