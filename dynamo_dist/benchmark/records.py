"""The findings of a comparison, as plain data.

JSON schema, version 1 (``Comparison.to_json``). Times are milliseconds unless the name says
otherwise, sizes bytes. A reader ignores fields that it does not know.

    schema, world_size, steps     ints
    backward, ok                  booleans
    topology, device              strings
    notes                         list of strings
    merged                        {variant: result}: differences, memory and breaks of the worst rank,
                                  step times of the slowest
    ranks                         list of {rank, variants: {variant: result}}

A result has the fields of ``VariantResult``, and ``step_ms_median`` and ``step_ms_spread``. A
difference that is infinite or not a number is a string, as JSON has no such numbers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_passes.records import restored

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
VARIANTS = ("eager", "stock", "ours")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Sums over the compiled graphs, before and after our passes; predicted, not measured."""

    topology: str
    exposed_us_before: float
    exposed_us_after: float
    peak_bytes_before: int
    peak_bytes_after: int


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One variant on one rank.

    max_output_diff, max_grad_diff: largest absolute difference to eager over the elements that this
        rank holds; ``worst`` names the tensor. 0 for eager itself.
    within_tolerance: every element within rtol and atol of eager's, and no tensor missing.
    launches: collectives that one step launched at run time, by kind.
    first_s: seconds of the first step, with the compile if there is one.
    step_ms: each timed step. memory_bytes: peak of the steps after it, ``memory_source`` says of what.
    error: why there are no numbers: stock could not compile or run the model.
    """

    variant: str
    max_output_diff: float = 0.0
    max_grad_diff: float = 0.0
    worst: str = ""
    within_tolerance: bool = True
    graphs: int = 0
    graph_breaks: int = 0
    launches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first_s: float = 0.0
    step_ms: tuple[float, ...] = ()
    memory_bytes: int = 0
    memory_source: str = ""
    simulated: Simulated | None = None
    error: str = ""

    @property
    def step_ms_median(self) -> float:
        """Median of the timed steps; NaN if there is none."""
        return statistics.median(self.step_ms) if self.step_ms else math.nan

    @property
    def step_ms_spread(self) -> tuple[float, float]:
        """Shortest and longest timed step."""
        return (min(self.step_ms), max(self.step_ms)) if self.step_ms else (math.nan, math.nan)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = dataclasses.asdict(self)
        data["step_ms_median"] = self.step_ms_median
        data["step_ms_spread"] = list(self.step_ms_spread)
        return {key: _finite(value) for key, value in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VariantResult:
        """Inverse of ``to_json``."""
        names = ("max_output_diff", "max_grad_diff", "first_s")
        result: VariantResult = restored(cls, {**data, **{n: float(data[n]) for n in names}})
        return result


@dataclass(frozen=True, slots=True)
class RankResult:
    """All variants on one rank, in the order of ``VARIANTS``."""

    rank: int
    variants: tuple[VariantResult, ...]

    def __getitem__(self, variant: str) -> VariantResult:
        for result in self.variants:
            if result.variant == variant:
                return result
        raise KeyError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"rank": self.rank, "variants": {v.variant: v.to_json() for v in self.variants}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankResult:
        """Inverse of ``to_json``."""
        results = tuple(VariantResult.from_json(v) for v in data["variants"].values())
        return cls(rank=int(data["rank"]), variants=results)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Eager, stock Inductor and ours on one model. The module's docstring documents the JSON."""

    ranks: tuple[RankResult, ...]
    world_size: int
    steps: int
    backward: bool
    device: str
    topology: str
    notes: tuple[str, ...] = ()

    @property
    def merged(self) -> dict[str, VariantResult]:
        """One result a variant: the worst rank's differences, the slowest rank's step times."""
        return {name: over_ranks([rank[name] for rank in self.ranks]) for name in VARIANTS}

    @property
    def ok(self) -> bool:
        """Return whether ours ran in one piece, within tolerance of eager, on every rank."""
        ours = self.merged["ours"]
        return ours.within_tolerance and not ours.error and ours.graph_breaks == 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        return {
            "schema": SCHEMA_VERSION,
            "ok": self.ok,
            "world_size": self.world_size,
            "steps": self.steps,
            "backward": self.backward,
            "device": self.device,
            "topology": self.topology,
            "notes": list(self.notes),
            "merged": {name: result.to_json() for name, result in self.merged.items()},
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    def __rich__(self) -> Table:
        from dynamo_dist.benchmark.table import comparison_table

        return comparison_table(self)

    def __str__(self) -> str:
        from dynamo_dist.benchmark.table import as_text

        return as_text(self)


def over_ranks(results: Sequence[VariantResult]) -> VariantResult:
    """One variant over its ranks; ``results`` has at least one entry."""
    worst = max(results, key=lambda r: _order(max(r.max_output_diff, r.max_grad_diff)))
    slowest = max(results, key=lambda r: _order(r.step_ms_median, nan=-1.0))
    simulated = [r.simulated for r in results if r.simulated is not None]
    return VariantResult(
        variant=results[0].variant,
        max_output_diff=max((r.max_output_diff for r in results), key=_order),
        max_grad_diff=max((r.max_grad_diff for r in results), key=_order),
        worst=worst.worst,
        within_tolerance=all(r.within_tolerance for r in results),
        graphs=max(r.graphs for r in results),
        graph_breaks=max(r.graph_breaks for r in results),
        launches=_most([r.launches for r in results]),
        first_s=max(r.first_s for r in results),
        step_ms=slowest.step_ms,
        memory_bytes=max(r.memory_bytes for r in results),
        memory_source=results[0].memory_source,
        simulated=max(simulated, key=lambda s: s.exposed_us_after) if simulated else None,
        error=next((r.error for r in results if r.error), ""),
    )


def _most(launches: Sequence[Mapping[str, int]]) -> dict[str, int]:
    kinds = sorted({kind for counts in launches for kind in counts})
    return {kind: max(counts.get(kind, 0) for counts in launches) for kind in kinds}


def _order(value: float, nan: float = math.inf) -> float:
    return nan if math.isnan(value) else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
