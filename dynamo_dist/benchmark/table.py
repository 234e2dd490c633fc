"""A comparison as a table for people."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from dynamo_dist.benchmark.records import VARIANTS, Comparison, VariantResult

TITLES = {"eager": "eager", "stock": "stock Inductor", "ours": "dynamo_dist"}


def comparison_table(comparison: Comparison) -> Table:
    """One column a variant, one row a question; the worst rank speaks for all."""
    merged = comparison.merged
    what = "forward and backward" if comparison.backward else "forward"
    ranks = "1 rank" if comparison.world_size == 1 else f"{comparison.world_size} ranks"
    table = Table(
        title=f"{what}, {ranks}, {comparison.device}: {'agree' if comparison.ok else 'DIFFER'}",
        caption="\n".join(comparison.notes) or None,
        caption_justify="left",
    )
    table.add_column("")
    for name in VARIANTS:
        table.add_column(TITLES[name], justify="right")
    for label, cells in _rows(comparison, merged):
        table.add_row(label, *(_cell(merged[name], cells[name]) for name in VARIANTS))
    for name in VARIANTS:
        if merged[name].error:
            table.add_row(f"{TITLES[name]} failed", merged[name].error.splitlines()[0][:160])
    return table


def as_text(comparison: Comparison, width: int = 110) -> str:
    """The table without colours."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(comparison)
    return out.getvalue().rstrip("\n")


def _cell(result: VariantResult, text: str) -> str:
    return "failed" if result.error else text


def _rows(
    comparison: Comparison, merged: Mapping[str, VariantResult]
) -> list[tuple[str, dict[str, str]]]:
    def row(label: str, cells: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        return label, dict(cells)

    def each(text: object) -> dict[str, str]:
        assert callable(text)
        return {name: str(text(result)) for name, result in merged.items()}

    compiled = [merged[name] for name in VARIANTS if name != "eager"]
    rows = [
        row("outputs: max difference to eager", each(lambda r: _diff(r, r.max_output_diff))),
    ]
    if comparison.backward:
        rows.append(row("gradients: max difference", each(lambda r: _diff(r, r.max_grad_diff))))
    rows += [
        row("graph breaks", each(lambda r: "" if r.variant == "eager" else r.graph_breaks)),
        row("graphs", each(lambda r: "" if r.variant == "eager" else r.graphs)),
        row("collectives launched in a step", each(lambda r: sum(r.launches.values()))),
    ]
    for kind in sorted({kind for r in merged.values() for kind in r.launches}):
        rows.append(row(f"  {kind}", each(lambda r, kind=kind: r.launches.get(kind, 0))))
    rows += [
        row(f"step, ms (real, {comparison.device}), median", each(_median)),
        row("  shortest to longest", each(_spread)),
        row("first step, s (compiles)", each(lambda r: f"{r.first_s:.1f}")),
        row(f"memory: {_source(merged)}", each(lambda r: f"{r.memory_bytes / 2**20:.0f} MiB")),
    ]
    if any(r.simulated for r in compiled):
        where = f"simulated on {comparison.topology}"
        rows.append(row(f"exposed, us ({where}), before", each(_exposed_before)))
        rows.append(row("  after our passes", each(_exposed_after)))
    return rows


def _diff(result: VariantResult, value: float) -> str:
    return "" if result.variant == "eager" else f"{value:.2e}"


def _median(result: VariantResult) -> str:
    return f"{result.step_ms_median:.2f}"


def _spread(result: VariantResult) -> str:
    low, high = result.step_ms_spread
    return f"{low:.2f} to {high:.2f}"


def _source(merged: Mapping[str, VariantResult]) -> str:
    return next((r.memory_source for r in merged.values() if r.memory_source), "not measured")


def _exposed_before(result: VariantResult) -> str:
    return f"{result.simulated.exposed_us_before:.0f}" if result.simulated else ""


def _exposed_after(result: VariantResult) -> str:
    return f"{result.simulated.exposed_us_after:.0f}" if result.simulated else ""
