"""Records of what the passes did to one graph, as plain data that survives JSON.

A warm compile cache runs no pass, so these records are stored beside the cache and read back
(``record_store.py``); reports, logs and the demo are made from nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
LEFT_ALONE = "left alone"

# One rank's send is another's receive.
ONE_SIDED = frozenset(("send", "recv", "isend", "irecv", "batch_p2p"))
# Ranks may give and get shares of different sizes.
OWN_SHARES = frozenset(("all_to_all", "gather", "scatter"))


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One launch of the final graph. ``payload_bytes`` is this rank's input, ``stack`` the user's line.

    ``why_exposed``: ``data``, ``channel``, ``memory cap``, ``at the bound``, ``order`` or ``no gain`` (the
    program's order was left alone), where the scheduler said it (``schedule/solution.py``). ``cause``: the
    change of placement that it carries out, where whoever traced the program noted one.
    """

    name: str
    kind: str
    group_name: str
    group_size: int
    payload_bytes: int
    dtype: str
    reduce_op: str | None
    stack: str
    predicted_us: float
    exposed_before_us: float
    exposed_after_us: float
    why_exposed: str = ""
    cause: str = ""

    def agreed(self) -> str:
        """Describe what every rank of the group must launch alike, as text; "" if that is nothing.

        A send has a receive on the other side; shares of an all_to_all, gather or scatter may differ.
        """
        if self.kind in ONE_SIDED:
            return ""
        parts = [self.kind] if self.reduce_op is None else [self.kind, self.reduce_op]
        size = [] if self.kind in OWN_SHARES else [f"of {self.payload_bytes} bytes"]
        return " ".join([*parts, *size, self.dtype])


@dataclass(frozen=True, slots=True)
class ExposedRecord:
    """A launch of a scheduled graph that is not hidden: ``reason`` as ``schedule.solution.Exposed`` has it."""

    name: str
    exposed_us: float
    reason: str


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """Decision of the scheduler on one graph: predicted, not measured.

    ``decision``: what was applied, or why nothing was. ``bound_us``: no schedule is shorter under the
    model; ``gap``: how far above it the makespan is, as a share of it. ``fixed``: nodes whose effects
    keep them, and everything around them, in place.
    """

    decision: str
    nodes: int
    launches: int
    buckets: int
    makespan_before_us: float
    makespan_after_us: float
    bound_us: float
    peak_before_bytes: int
    peak_after_bytes: int
    cap_bytes: int
    seconds: float
    exposed: tuple[ExposedRecord, ...] = ()
    fixed: tuple[str, ...] = ()
    gap: float = field(init=False)

    @property
    def left_alone(self) -> bool:
        """Return whether the program's order stayed, because no other gains enough."""
        return self.decision.startswith(LEFT_ALONE)

    def __post_init__(self) -> None:
        above = self.makespan_after_us / self.bound_us - 1 if self.bound_us > 0 else 0.0
        object.__setattr__(self, "gap", max(0.0, above))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScheduleRecord:
        """Inverse of ``dataclasses.asdict``."""
        fields = known(cls, data)
        exposed = (ExposedRecord(**known(ExposedRecord, e)) for e in fields.get("exposed", ()))
        fields.update(exposed=tuple(exposed), fixed=tuple(fields.get("fixed", ())))
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass; ``status`` is ``ran``, ``skipped`` (with ``reason``) or ``failed``.

    ``schedule`` is there where the pass is the global scheduler; ``notes`` where a pass explains its decisions.
    """

    name: str
    numerics: str
    status: str
    changed: bool
    counters: dict[str, int]
    seconds: float
    reason: str = ""
    schedule: ScheduleRecord | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PassRecord:
        """Inverse of ``dataclasses.asdict``."""
        schedule = data.get("schedule")
        fields = {**known(cls, data), "notes": tuple(data.get("notes", ()))}
        fields["schedule"] = None if schedule is None else ScheduleRecord.from_json(schedule)
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One box of a timeline. ``lane`` is ``compute`` or a process group's name; times in microseconds.

    ``why_exposed``: of an exposed collective, as ``CollectiveRecord`` has it.
    """

    lane: str
    name: str
    kind: str
    start_us: float
    duration_us: float
    why_exposed: str = ""


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """A predicted execution of one graph on one rank: simulated, not measured.

    ``memory``: microseconds and bytes of the graph's own values, wherever they change.
    """

    spans: tuple[SpanRecord, ...]
    makespan_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    peak_bytes: int
    memory: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FigureRecord:
    """A number that reports show of a graph: predicted, not measured. ``unit`` is ``us``, ``bytes`` or a word."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph. ``phase`` is ``forward``, ``backward`` or ``inference``.

    ``order_kept`` says whether launches and waits stand in the generated code as the passes left
    them; None where the generated code was not looked at.
    """

    graph_id: str
    phase: str
    node_count: int
    topology: str
    passes: tuple[PassRecord, ...]
    collectives: tuple[CollectiveRecord, ...]
    before: TimelineRecord
    after: TimelineRecord
    order: tuple[str, ...] = ()
    order_kept: bool | None = None
    warnings: tuple[str, ...] = ()
    figures: tuple[FigureRecord, ...] = ()

    @property
    def schedule(self) -> ScheduleRecord | None:
        """Decision of the global scheduler; None where it did not run."""
        return next((p.schedule for p in self.passes if p.schedule is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphRecord:
        """Inverse of ``to_json``. Raises ValueError for another schema version."""
        fields = known(cls, data)
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"graph record has schema {data.get('schema')}, expected {SCHEMA_VERSION}"
            )
        fields["passes"] = tuple(PassRecord.from_json(p) for p in fields["passes"])
        fields["collectives"] = tuple(
            CollectiveRecord(**known(CollectiveRecord, c)) for c in fields["collectives"]
        )
        for which in ("before", "after"):
            timeline = known(TimelineRecord, fields[which])
            timeline["spans"] = tuple(SpanRecord(**known(SpanRecord, s)) for s in timeline["spans"])
            timeline["memory"] = tuple((at, size) for at, size in timeline.get("memory", ()))
            fields[which] = TimelineRecord(**timeline)
        fields["figures"] = tuple(
            FigureRecord(**known(FigureRecord, f)) for f in fields.get("figures", ())
        )
        for which in ("order", "warnings"):
            fields[which] = tuple(fields.get(which, ()))
        return cls(**fields)


def known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a record is made of; others are of a later version, or computed."""
    names = _names(cls)
    return {key: value for key, value in data.items() if key in names}


@functools.cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls) if f.init)
