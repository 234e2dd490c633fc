"""Records of what the passes did to one graph, as plain data that survives JSON.

A warm compile cache runs no pass, so these records are stored beside the cache and read back
(``report/recorder.py``); reports, logs and the demo are made from nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
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
    """One launch of the final graph. ``payload_bytes`` is this rank's input, ``stack`` the user's
    line.

    ``why_exposed``: ``data``, ``channel``, ``memory cap``, ``at the bound``, ``order`` or ``no
    gain`` (the program's order was left alone), where the scheduler said it
    (``schedule/solver/problem.py``). ``cause``: the change of placement that it carries out, where
    whoever traced the program noted one.
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
        """Describe what every rank of the group must launch equally, as text; "" if nothing.

        A send has a receive on the other side, so one-sided kinds need not be equal. Shares of an
        all_to_all, gather or scatter may differ, so their sizes are left out.
        """
        if self.kind in ONE_SIDED:
            return ""
        parts = [self.kind] if self.reduce_op is None else [self.kind, self.reduce_op]
        size = [] if self.kind in OWN_SHARES else [f"of {self.payload_bytes} bytes"]
        return " ".join([*parts, *size, self.dtype])


@dataclass(frozen=True, slots=True)
class ExposedRecord:
    """A launch of a scheduled graph that is not hidden: ``reason`` as
    ``schedule.solution.Exposed`` has it.
    """

    name: str
    exposed_us: float
    reason: str


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """Decision of the scheduler on one graph: predicted, not measured.

    ``decision``: what was applied, or why nothing was. ``bound_us``: no schedule is shorter under
    the model; ``gap``: how far above it the makespan is, as a share of it. ``fixed``: nodes whose
    effects keep them, and everything around them, in place.
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


@dataclass(frozen=True, slots=True)
class TriedRecord:
    """One way to cut a graph that was looked at: ``seed`` is the (first) value that is read in
    parts, ``along`` how.

    ``half``: ``forward`` or ``backward``, where only this of a joint graph is cut so. Predicted of
    the cut graph, with all that is cut beside, scheduled, not measured.
    """

    parts: int
    seed: str
    along: str
    launches: int
    makespan_us: float
    peak_bytes: int
    half: str = ""


@dataclass(frozen=True, slots=True)
class EndedRecord:
    """An operator that a cut region stops at, why, the user's line, and how often that was so."""

    operator: str
    reason: str
    stack: str
    count: int


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Regions of one graph that were cut alike: ``count`` of them, from values like ``seed`` on,
    along ``along`` in ``parts`` parts.

    ``line``: the user's, of the first launch that is cut. ``half``: as a ``TriedRecord`` has it.
    ``before_us``, ``after_us``: the predicted step without these regions and with them; those
    chosen together share both. ``ended``: what they stop at.
    """

    parts: int
    seed: str
    along: str
    half: str
    line: str
    count: int
    launches: int
    nodes: int
    joins: int
    before_us: float
    after_us: float
    ended: tuple[EndedRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """Decision on cutting one graph into parts: predicted, not measured. ``parts`` is 1 where it
    was left whole.

    ``parts``, ``seed`` and ``along`` are of the first of its ``regions``; ``launches``, ``nodes``
    and ``joins`` of all.

    ``makespan_uncut_us``, ``makespan_cut_us``: of the graph, scheduled. ``limit_us``: no order is
    shorter, nor any cut that was looked at (``schedule/solver/lower_bound.py``). These, and what
    was ``tried``, are of the graph with ``layers_tried`` of its ``layers`` equal layers.
    """

    decision: str
    parts: int
    seed: str
    along: str
    launches: int
    nodes: int
    joins: int
    makespan_uncut_us: float
    makespan_cut_us: float
    limit_us: float
    seconds: float
    tried: tuple[TriedRecord, ...] = ()
    ended: tuple[EndedRecord, ...] = ()
    layers: int = 1
    layers_tried: int = 1
    regions: tuple[RegionRecord, ...] = ()

    @property
    def closed(self) -> float:
        """Share of the distance from the scheduled uncut graph to the limit that the cut takes
        away.
        """
        distance = self.makespan_uncut_us - self.limit_us
        return (self.makespan_uncut_us - self.makespan_cut_us) / distance if distance > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass; ``status`` is ``ran`` or ``skipped`` (with ``reason``).

    ``schedule`` is there where the pass is the global scheduler, ``split`` where it cuts graphs
    into parts; ``notes`` where a pass explains its decisions.
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
    split: SplitRecord | None = None


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One box of a timeline. ``lane`` is ``compute`` or a process group's name; times in
    microseconds.

    ``why_exposed``: of an exposed collective, as ``CollectiveRecord`` has it. ``stage``, where the
    graph is a whole training step: ``forward``, ``backward`` or ``update``.
    """

    lane: str
    name: str
    kind: str
    start_us: float
    duration_us: float
    why_exposed: str = ""
    stage: str = ""


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
    """A number that reports show of a graph: predicted, not measured. ``unit`` is ``us``,
    ``bytes`` or a word.
    """

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """Where a graph's passes were looked for: ``status`` is ``hit``, ``miss`` or ``off``.

    ``why``: whose cache had it; or what of its key is not as in the compile before, or why nobody
    can tell.
    """

    status: str
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status}: {', '.join(self.why)}" if self.why else self.status


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph. ``phase`` is ``forward``, ``backward`` or ``inference``.

    ``order_kept`` says whether launches and waits stand in the generated code as the passes left
    them; None where the generated code was not looked at. ``cache``: None for a graph without
    launches.
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
    cache: CacheRecord | None = None

    @property
    def key(self) -> str:
        """Which graph this is: a later record of the same key replaces an earlier one."""
        return self.graph_id

    @property
    def is_whole_step(self) -> bool:
        """Return whether the graph holds forward, backward and update of a training step."""
        return any(span.stage for span in self.after.spans)

    @property
    def schedule(self) -> ScheduleRecord | None:
        """Decision of the global scheduler; None where it did not run."""
        return next((p.schedule for p in self.passes if p.schedule is not None), None)

    @property
    def split(self) -> SplitRecord | None:
        """Decision on cutting the graph into parts; None where that was off."""
        return next((p.split for p in self.passes if p.split is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        return {"schema": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GraphRecord:
        """Inverse of ``to_json``. Raises ValueError for another schema version."""
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"graph record has schema {data.get('schema')}, expected {SCHEMA_VERSION}"
            )
        return restored(cls, data)


def restored(hint: Any, data: Any) -> Any:
    """A record, or the value of a field of type ``hint``, from plain data; entries that no field
    takes are left out.

    They are of a later version, or computed. Raises TypeError for a missing field, and for what is
    no list where one belongs.
    """
    item, is_tuple, cls = _shape(hint)
    if isinstance(data, (list, tuple)):
        return tuple([restored(item, each) for each in data])
    if is_tuple:
        raise TypeError(f"{data!r} is no list")
    if cls is None or (data is None and hint is not cls):
        return data
    fields = _fields(cls)
    return cls(**{name: restored(fields[name], data[name]) for name in fields.keys() & data})


@functools.cache
def _shape(hint: Any) -> tuple[Any, bool, Any]:
    """The type of a list's items, whether it has to be a list, and the record that it is or
    holds.
    """
    parts = typing.get_args(hint)
    cls = next((part for part in (hint, *parts) if dataclasses.is_dataclass(part)), None)
    return (parts[0] if parts else None), typing.get_origin(hint) is tuple, cls


@functools.cache
def _fields(cls: Any) -> dict[str, Any]:
    """Names of the fields that a record is made of, and their types."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
