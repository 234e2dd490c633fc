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
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from inductor_passes.records import GraphRecord, known

SCHEMA_VERSION = 1
MOST_RANKS = 2**20  # the ranks that gave no report are listed one by one

Effect = Literal["split", "eager", "error"]
_Record = TypeVar("_Record", "BreakRecord", "RecompileRecord", "PlanRecord", "Fact")


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


@dataclass(frozen=True, slots=True)
class RecompileRecord:
    """A function that was compiled again, and the first guard that failed."""

    function: str
    user_line: str
    guard: str
    count: int = 1


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
    """

    graph: str
    method: str
    steps: int
    stock_us: float
    planned_us: float
    bound_us: float
    changes: tuple[PlannedStep, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanRecord:
        """Inverse of ``dataclasses.asdict``."""
        changes = tuple(
            PlannedStep(item["op"], tuple(item["stock"]), tuple(item["planned"]))
            for item in data["changes"]
        )
        return dataclasses.replace(known_fields(cls, data), changes=changes)


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that somebody measured or computed. ``source`` says how, in the reader's words."""

    name: str
    value: float | str | tuple[float, ...]
    unit: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One rank's run. The module's docstring documents its JSON."""

    rank: int = field(default=0, metadata={"minimum": 0, "maximum": MOST_RANKS})
    world_size: int = field(default=1, metadata={"minimum": 1, "maximum": MOST_RANKS})
    torch_version: str = ""
    plugin_version: str = ""
    topology: str = ""
    graphs: tuple[GraphRecord, ...] = ()
    breaks: tuple[BreakRecord, ...] = ()
    recompiles: tuple[RecompileRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    facts: tuple[Fact, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        return {
            "schema": SCHEMA_VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "torch_version": self.torch_version,
            "plugin_version": self.plugin_version,
            "topology": self.topology,
            "graphs": [graph.to_json() for graph in self.graphs],
            "breaks": [dataclasses.asdict(item) for item in self.breaks],
            "recompiles": [dataclasses.asdict(item) for item in self.recompiles],
            "plans": [dataclasses.asdict(item) for item in self.plans],
            "facts": [dataclasses.asdict(item) for item in self.facts],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunReport:
        """Inverse of ``to_json``. Raises ValueError for another schema version or a missing field."""
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"This report has schema {data.get('schema')}, but this version reads schema "
                f"{SCHEMA_VERSION}. Write the report anew, or read it with the version that wrote it."
            )
        try:
            return cls(
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                torch_version=str(data["torch_version"]),
                plugin_version=str(data["plugin_version"]),
                topology=str(data["topology"]),
                graphs=tuple(GraphRecord.from_json(item) for item in data["graphs"]),
                breaks=tuple(known_fields(BreakRecord, item) for item in data["breaks"]),
                recompiles=tuple(
                    known_fields(RecompileRecord, item) for item in data["recompiles"]
                ),
                plans=tuple(PlanRecord.from_json(item) for item in data.get("plans", ())),
                facts=tuple(known_fields(Fact, item) for item in data["facts"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"This report cannot be read: {type(error).__name__}: {error}. Its schema version is "
                "right but a field is missing or has another type; write the report anew."
            ) from error


def known_fields(cls: type[_Record], data: Mapping[str, Any]) -> _Record:
    """``cls`` from the fields that it has; lists become tuples again."""
    fields = known(cls, data)
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    return cls(**fields)
