"""Results of the demo, as one JSON object and as tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from data import Sizes
from figures import quartiles, ratios, slowest
from rich.console import Console
from rich.table import Table

from dynamo_dist.numerics import comparison

TITLES = comparison.TITLES | {
    "upstream_blocks": "upstream, block by block",
    "split_auto": "in parts, auto",
    "split_2": "in 2 parts",
}
# fp32, the same batches: what reassociated sums may add up to over 20 optimizer steps.
TOLERANCE = 1e-5


def training_results(
    ranks: list[dict[str, Any]], sizes: Sizes, parameters: int, written: Iterable[Path]
) -> dict[str, Any]:
    """The object that ``--json`` prints, from what each rank wrote.

    Times are milliseconds (real, of the slower rank), exposed times microseconds (simulated on
    ``topology``); launches are those of one step of ours on one rank.
    """
    merged = {
        name: over_ranks([rank["variants"][name] for rank in ranks])
        for name in ranks[0]["variants"]
    }
    losses = {name: ranks[0]["variants"][name]["losses"] for name in merged}
    differences = {name: _loss_difference(ranks, name) for name in merged if name != "eager"}
    ours = merged["ours"]
    before_us, after_us = ours["exposed_us"]
    mine = [gap for name, gap in differences.items() if name == "ours" or is_within(name)]
    ok = max(mine) < TOLERANCE and ours["graph_breaks"] == 0
    return {
        "ok": ok,
        "graph_breaks": ours["graph_breaks"],
        "graph_breaks_upstream": merged["upstream"]["graph_breaks"],
        "graphs": ours["graphs"],
        "max_loss_diff": differences["ours"],
        "max_loss_diff_upstream": differences["upstream"],
        "launches": sum(ours["launches"].values()),
        "launches_by_kind": {name: result["launches"] for name, result in merged.items()},
        "exposed_us_before": before_us,
        "exposed_us_after": after_us,
        "topology": ours["topology"],
        "step_ms": {name: statistics.median(r["step_ms"]) for name, r in merged.items()},
        "step_ms_spread": {
            name: [min(r["step_ms"]), max(r["step_ms"])] for name, r in merged.items()
        },
        **_ours_to_upstream(ranks),
        "decided_within": {n: r["decided"] for n, r in merged.items() if r["decided"]},
        "first_step_s": {name: result["first_s"] for name, result in merged.items()},
        "losses": losses,
        "model": str(sizes),
        "parameters": parameters,
        "ranks": len(ranks),
        "torch": torch.__version__,
        **paths(written),
    }


def over_ranks(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One variant over its ranks: the most graphs, breaks and exposed time, the steps of the
    slowest.
    """
    kinds = sorted({kind for result in results for kind in result["launches"]})
    return {
        **max(results, key=lambda result: result["exposed_us"][1]),
        **{key: max(r[key] for r in results) for key in ("graphs", "graph_breaks", "first_s")},
        "launches": {kind: max(r["launches"].get(kind, 0) for r in results) for kind in kinds},
        "step_ms": max((r["step_ms"] for r in results), key=statistics.median),
    }


def _ours_to_upstream(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of steps that stood in one turn, each of the slower rank; and forward and backward
    apart.
    """

    def times(name: str, what: str) -> list[float]:
        return slowest([rank["variants"][name][what] for rank in ranks])

    def to(name: str) -> list[float]:
        return ratios(times("ours", "step_ms"), times(name, "step_ms"))

    steps = to("upstream")
    names = ranks[0]["variants"]
    gradients = {name: statistics.median(times(name, "forward_backward_ms")) for name in names}
    found = {
        "timed_steps": len(steps),
        "ratio_ours_to_upstream": statistics.median(steps),
        "ratio_quartiles": quartiles(steps),
        "forward_backward_ms": gradients,
        "ratio_ours_to": {name: statistics.median(to(name)) for name in names if name != "ours"},
    }
    if by_name := ranks[0].get("predicted"):
        found["predicted_forward_backward"] = predicted = by_name["ours"]
        errors = {name: each["ours_ms"] / gradients[name] - 1 for name, each in by_name.items()}
        found["prediction_error"] = errors.pop("ours")
        found["prediction_errors_within"] = errors
        found["forward_backward_to_longer_alone"] = gradients["ours"] / predicted["longer_alone_ms"]
    return found


def training(results: dict[str, Any]) -> None:
    """Two tables and where the report is."""
    console = wide_console()
    losses = results["losses"]
    table = Table(title=f"loss of each step, fp32, {results['ranks']} ranks")
    table.add_column("step", justify="right")
    for name in losses:
        table.add_column(
            "dynamo_dist, compiled" if name == "ours" else title(name), justify="right"
        )
    table.add_column("difference, ours to eager", justify="right")
    for step, row in enumerate(zip(*losses.values(), strict=True)):
        values = dict(zip(losses, row, strict=True))
        gap = f"{abs(values['ours'] - values['eager']):.1e}"
        table.add_row(str(step), *(f"{value:.6f}" for value in row), gap)
    console.print(table)

    table = Table(title=f"{results['model']}, {results['parameters'] / 1e6:.1f} M parameters")
    table.add_column("")
    for name in losses:
        table.add_column(title(name), justify="right")
    breaks = {"upstream": results["graph_breaks_upstream"], "ours": results["graph_breaks"]}
    table.add_row("graph breaks", *(str(breaks.get(name, "")) for name in losses))
    table.add_row("largest loss difference to eager", *_loss_cells(results))
    launches = results["launches_by_kind"]
    table.add_row(
        "collectives launched in a step", *(str(sum(launches[n].values())) for n in losses)
    )
    for kind in sorted({kind for counts in launches.values() for kind in counts}):
        table.add_row(f"  {kind}", *(str(launches[name].get(kind, 0)) for name in losses))
    table.add_row(
        f"step, ms ({results['measured']}), median",
        *(f"{results['step_ms'][n]:.1f}" for n in losses),
    )
    spreads = results["step_ms_spread"]
    table.add_row(
        "  shortest to longest", *(f"{spreads[n][0]:.1f} to {spreads[n][1]:.1f}" for n in losses)
    )
    gradients = results["forward_backward_ms"]
    table.add_row("  forward and backward of it", *(f"{gradients[n]:.1f}" for n in losses))
    if predicted := results.get("predicted_forward_backward"):
        table.add_row(
            "  predicted, on the machine and link measured",
            *_only_ours(losses, f"{predicted['ours_ms']:.1f}"),
        )
        table.add_row(
            "  the longer of compute and communication alone",
            *_only_ours(losses, f"{predicted['longer_alone_ms']:.1f}"),
        )
    table.add_row("first step, s", *(f"{results['first_step_s'][name]:.1f}" for name in losses))
    if results["topology"] is not None:
        where = f"simulated on {results['topology']}"
        table.add_row(
            f"exposed communication, us ({where}), before",
            *_only_ours(losses, f"{results['exposed_us_before']:.1f}"),
        )
        table.add_row("  after", *_only_ours(losses, f"{results['exposed_us_after']:.1f}"))
    console.print(table)
    verdict = "agree" if results["ok"] else "DO NOT AGREE"
    low, high = results["ratio_quartiles"]
    console.print(
        f"step, ours / upstream: {results['ratio_ours_to_upstream']:.3f} (quartiles {low:.3f} to "
        f"{high:.3f}, {results['timed_steps']} steps in turn)"
    )
    console.print(f"eager and compiled {verdict} (limit {TOLERANCE:g}, no graph break)")
    for what in ("report", "trace"):
        if results[what]:
            console.print(f"{what}: {results[what]}", soft_wrap=True)


def is_within(name: str) -> bool:
    """Whether a variant is ours within a memory budget."""
    return name.startswith("memory_")


def title(name: str) -> str:
    """A variant's name for people."""
    return name.replace("memory_", "within ") if is_within(name) else TITLES[name]


def _loss_difference(ranks: list[dict[str, Any]], name: str) -> float:
    gaps = [
        abs(a - b)
        for rank in ranks
        for a, b in zip(
            rank["variants"]["eager"]["losses"], rank["variants"][name]["losses"], strict=True
        )
    ]
    return max(gaps, key=lambda gap: float("inf") if gap != gap else gap)


def _only_ours(names: Any, value: object) -> list[str]:
    return [str(value) if name == "ours" else "" for name in names]


def _loss_cells(results: dict[str, Any]) -> list[str]:
    by_name = {"ours": results["max_loss_diff"], "upstream": results["max_loss_diff_upstream"]}
    return [f"{by_name[name]:.1e}" if name in by_name else "" for name in results["losses"]]


def wide_console() -> Console:
    """On stdout; into a file or pipe, wide enough for the tables."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)


def paths(written: Iterable[Path]) -> dict[str, str | None]:
    """``report`` and ``trace`` among the files that were written; None if there are none."""
    by_kind = {path.name.split(".")[0] + path.suffix: str(path) for path in written}
    return {"report": by_kind.get("report.html"), "trace": by_kind.get("trace.json")}
