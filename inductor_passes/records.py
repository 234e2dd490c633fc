"""What the passes did to one graph, as plain data that survives JSON.

A warm compile cache runs no pass, so these records are stored beside the cache and read back
(``record_store.py``); reports, logs and the demo are made from nothing else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One launch of the final graph. ``payload_bytes`` is this rank's input, ``stack`` the user's line."""

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


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass; ``status`` is ``ran``, ``skipped`` (with ``reason``) or ``failed``."""

    name: str
    numerics: str
    status: str
    changed: bool
    counters: dict[str, int]
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One box of a timeline. ``lane`` is ``compute`` or a process group's name; times in microseconds."""

    lane: str
    name: str
    kind: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """A predicted execution of one graph on one rank: simulated, not measured."""

    spans: tuple[SpanRecord, ...]
    makespan_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    peak_bytes: int


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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphRecord:
        """Inverse of ``to_json``. Raises ValueError for another schema version."""
        fields = dict(data)
        if fields.pop("schema", None) != SCHEMA_VERSION:
            raise ValueError(
                f"graph record has schema {data.get('schema')}, expected {SCHEMA_VERSION}"
            )
        fields["passes"] = tuple(PassRecord(**p) for p in fields["passes"])
        fields["collectives"] = tuple(CollectiveRecord(**c) for c in fields["collectives"])
        for which in ("before", "after"):
            timeline = dict(fields[which])
            timeline["spans"] = tuple(SpanRecord(**s) for s in timeline["spans"])
            fields[which] = TimelineRecord(**timeline)
        fields["order"] = tuple(fields["order"])
        fields["warnings"] = tuple(fields["warnings"])
        return cls(**fields)
