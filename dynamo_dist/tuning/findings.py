"""One rank's clocks as text, and what rank 0 makes of those of all ranks: tables of times, and the steps that they are of."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_dist.tuning.codes import Clocks
from dynamo_dist.tuning.report import TuneReport
from inductor_passes.machine.times.file import of_text, to_text
from inductor_passes.machine.times.times import Times
from inductor_passes.tuning.outliers import Outlier
from inductor_passes.tuning.probes import Probe, Spans, launch_times
from inductor_passes.tuning.table import merged, pack, unpack


@dataclass(frozen=True, slots=True)
class Findings:
    """``tables``: by place in the program. ``slow``: ranks and how many times as long their compute takes.

    ``before_us``: of a step as it was scheduled, the median over steps of the slowest rank. ``left``: a line for each graph without times.
    """

    tables: Mapping[str, Times]
    slow: Mapping[int, float]
    before_us: float
    steps: int
    outliers: tuple[Outlier, ...] = ()
    left: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Findings:
        """Inverse of what ``findings`` returns."""
        data = json.loads(text)
        return cls(
            {place: of_text(table) for place, table in data["tables"].items()},
            {int(rank): factor for rank, factor in data["slow"].items()},
            data["before_us"],
            data["steps"],
            tuple(Outlier(*each) for each in data["outliers"]),
            tuple(data["left"]),
        )

    def report(self, decision: str, **figures: Any) -> TuneReport:
        """What all ranks report."""
        a_table = next(iter(self.tables.values()))
        return TuneReport(
            decision,
            steps=self.steps,
            before_us=self.before_us,
            compute_stretch=a_table.compute_stretch,
            inter_stretch=a_table.inter_stretch,
            launch_stretch=a_table.launch_stretch,
            slow=self.slow,
            outliers=self.outliers,
            left=self.left,
            **figures,
        )


COMPILED = "a step compiled while steps were timed"


def evidence(
    clocks: Clocks,
    walls: list[float],
    *,
    compiled: bool = False,
    probed: Mapping[int, Spans] | None = None,
) -> str:
    """What this rank's clocks show, and microseconds on the wall of the steps that ran as scheduled.

    ``compiled``: whether one of the steps compiled. ``probed``: spans of probes by their number in the plan.
    """
    return json.dumps(
        {
            "walls": walls,
            "graphs": pack(clocks.calls()),
            "compiled": compiled,
            "left": clocks.left,
            "probed": probed or {},
        }
    )


def findings(
    of_ranks: Mapping[int, str], *, steps: int, world: int, planned: Sequence[Probe] = ()
) -> str:
    """Make one text of all ranks' evidence. Raises ValueError where it shows nothing.

    ``planned``: the probes that ranks have launched.
    """
    data = {rank: json.loads(text) for rank, text in of_ranks.items()}
    if any(each["compiled"] for each in data.values()):
        raise ValueError(COMPILED)
    probed = {
        rank: {int(number): spans for number, spans in each["probed"].items()}
        for rank, each in data.items()
    }
    graphs = {rank: unpack(each["graphs"]) for rank, each in data.items()}
    found = merged(graphs, steps, world, launch_times(planned, probed))
    left = list(
        dict.fromkeys((*found.left, *(line for each in data.values() for line in each["left"])))
    )
    if not found.tables:
        why = "the step runs no compiled graph whose launches can be timed"
        raise ValueError("; ".join((why, *left)))
    walls = {rank: json.dumps(each["walls"]) for rank, each in data.items()}
    return json.dumps(
        {
            "tables": {place: to_text(times) for place, times in found.tables.items()},
            "slow": found.slow,
            "outliers": [dataclasses.astuple(each) for each in found.outliers],
            "before_us": float(slowest(walls)),
            "steps": steps,
            "left": left,
        }
    )


def slowest(of_ranks: Mapping[int, str]) -> str:
    """The median over steps of the slowest rank of each."""
    walls: list[list[float]] = [json.loads(text) for text in of_ranks.values()]
    return str(statistics.median(map(max, zip(*walls, strict=False))))


@dataclass(frozen=True, slots=True)
class Outcome:
    """``after_us``: of a step that was scheduled anew, the median over steps of the slowest rank; ``changed``: on any rank."""

    after_us: float
    changed: bool

    @classmethod
    def of_text(cls, text: str) -> Outcome:
        """Inverse of what ``outcome`` returns."""
        return cls(**json.loads(text))


def seen(walls: Sequence[float], *, changed: bool) -> str:
    """What this rank saw of the steps that were scheduled anew."""
    return json.dumps({"walls": list(walls), "changed": changed})


def outcome(of_ranks: Mapping[int, str]) -> str:
    """Make one outcome of what all ranks saw."""
    data = {rank: json.loads(text) for rank, text in of_ranks.items()}
    walls = {rank: json.dumps(each["walls"]) for rank, each in data.items()}
    changed = any(each["changed"] for each in data.values())
    return json.dumps({"after_us": float(slowest(walls)), "changed": changed})


def error_of(clocks: Clocks) -> float:
    """How far the predicted times of this rank's graphs, scheduled, are from those measured, together."""
    measured_us: Any = {name: us for name, us in clocks.us("scheduled").items() if us}
    took = sum(statistics.median(us) for us in measured_us.values())
    said = sum(us for name, us in clocks.predicted_us().items() if name in measured_us)
    return abs(said / took - 1) if took else 0.0
