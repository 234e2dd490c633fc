"""The sweep of DTensor's sharding strategies as a part: a program is an operator of torch's
database.
"""

from __future__ import annotations

from collections.abc import Callable

from comparison.outcome import End
from comparison.strategies.operator import sweep
from comparison.strategies.samples import operators

LIMIT = 4  # samples of an operator of each kind of sizes
STATUS = {"ok": "right", "no tensor input": "unfit", "wrong": "wrong", "wrong backward": "wrong"}


def names(part: str) -> list[str]:
    """Every operator."""
    return list(operators())


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Checks an operator on all ranks, which are in this process."""
    known = operators()

    def run(name: str) -> End:
        report = sweep(name, known[name], LIMIT)
        number, total = report.counts.get(report.verdict, 0), sum(report.counts.values())
        said = f"{report.verdict} ({number} of {total})"
        example = report.examples.get(report.verdict, "")
        return End(STATUS.get(report.verdict, "error"), f"{said}: {example}" if example else "")

    return run
