"""The record of one run, as plain data: the only thing that text, JSON, HTML and trace are made from.

JSON schema, version 1 (``RunReport.to_json``). Times are microseconds, sizes bytes; every list keeps
the order in which things were seen. A reader ignores fields it does not know; the version rises when
a field changes its meaning or goes.

    schema           1
    rank, world_size ints
    torch_version, plugin_version, topology   strings; topology is "" where no graph was costed
    graphs           list of graph records, each with a "schema" of its own
                     (inductor_passes.records.GraphRecord.to_json)
    breaks           list of {kind, reason, user_line, explanation, fix, cause, effect, count, hints}
    recompiles       list of {function, user_line, guard, count}
    plans            list of {graph, method, steps, stock_us, planned_us, bound_us, changes}; changes is
                     a list of {op, stock, planned}: where stock and the plan put an operation's inputs
    facts            list of {name, value, unit, source}; value is a number, a string or a list of
                     numbers, source says where it comes from: "simulated on h100x8",
                     "measured, CPU", "emulated link, 1 Gbit/s"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inductor_passes.records import GraphRecord, restored
from inductor_passes.report.figures import SCHEMA_VERSION, GraphsReport

Effect = Literal["split", "eager", "error"]


@dataclass(frozen=True, slots=True)
class BreakRecord:
    """One place where Dynamo could not go on, and how often it met it.

    ``kind`` is Dynamo's fixed name of the break and ``reason`` what it said about this one;
    ``explanation`` and ``fix`` (code, or advice as comments) come from ``catalog``, whose entry
    ``cause`` names; ``cause`` is "" where Dynamo's own words had to do. ``user_line`` is
    ``file:line: code``. ``effect``: ``split`` in two graphs, ``eager`` for the rest of the function
    or all of it, or ``error``: the compile failed.
    """

    kind: str
    reason: str
    user_line: str
    explanation: str
    fix: str
    cause: str = ""
    effect: Effect = "split"
    count: int = 1
    hints: tuple[str, ...] = ()

    @property
    def key(self) -> object:
        """Which break this is."""
        return self.kind, self.reason, self.user_line


@dataclass(frozen=True, slots=True)
class RecompileRecord:
    """A function that was compiled again, and the first guard that failed."""

    function: str
    user_line: str
    guard: str
    count: int = 1

    @property
    def key(self) -> object:
        """Which recompile this is."""
        return self.function, self.user_line, self.guard


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One operation whose inputs the plan puts elsewhere than stock would: ``S0``, ``R``, ``P`` per input."""

    op: str
    stock: tuple[str, ...]
    planned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The placements of one Dynamo graph, re-solved; ``graph`` is its name in a plan file.

    Times are modelled, communication and compute, in microseconds; no plan takes less than ``bound_us``.
    ``source``: the file that it was read from, the user's or one beside the cache; "" where it was made anew.
    """

    graph: str
    method: str
    steps: int
    stock_us: float
    planned_us: float
    bound_us: float
    changes: tuple[PlannedStep, ...] = ()
    source: str = ""

    @property
    def key(self) -> object:
        """Which plan this is."""
        return self.graph


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that somebody measured or computed. ``source`` says how, in the reader's words."""

    name: str
    value: float | str | tuple[float, ...]
    unit: str = ""
    source: str = ""

    @property
    def key(self) -> object:
        """Which figure this is."""
        return self.name


Part = GraphRecord | BreakRecord | RecompileRecord | PlanRecord | Fact
# Field of a report that has several -> what they are.
PARTS: dict[str, type[Part]] = {
    "graphs": GraphRecord,
    "breaks": BreakRecord,
    "recompiles": RecompileRecord,
    "plans": PlanRecord,
    "facts": Fact,
}


@dataclass(frozen=True, slots=True)
class RunReport(GraphsReport):
    """One rank's run. The module's docstring documents its JSON."""

    breaks: tuple[BreakRecord, ...] = ()
    recompiles: tuple[RecompileRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    facts: tuple[Fact, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunReport:
        """Inverse of ``to_json``. Raises ValueError for another schema version or a missing field."""
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"This report has schema {data.get('schema')}, but this version reads schema "
                f"{SCHEMA_VERSION}. Write the report anew, or read it with the version that wrote it."
            )
        try:
            needed = {f.name: data[f.name] for f in dataclasses.fields(GraphsReport)}
            needed["graphs"] = tuple(map(GraphRecord.from_json, needed["graphs"]))
            report: RunReport = restored(cls, {**data, "graphs": ()})
            if "breaks" not in data:
                off = Fact("graph breaks", "not looked at: this plugin was off")
                needed["facts"] = (*report.facts, off)
            return dataclasses.replace(report, **needed)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"This report cannot be read: {type(error).__name__}: {error}. Its schema version is "
                "right but a field is missing or has another type; write the report anew."
            ) from error
