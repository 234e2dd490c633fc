"""Records of a sweep as figures and as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

WRONG = ("wrong", "wrong backward", "crash", "timeout")


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """``702 operators: 640 ok, ...``: how many operators have each verdict."""
    counts = Counter(record["verdict"] for record in records)
    return f"{len(records)} operators: " + ", ".join(
        f"{number} {verdict}" for verdict, number in counts.most_common()
    )


FIRST_ROW = "| rules | operators |"


def update(text: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page with its tables made anew; what stands before them stays."""
    return text.partition(FIRST_ROW)[0] + table(found)


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: figures, then one row for each operator that is not ok under some rules."""
    lines = [FIRST_ROW, "| --- | --- |"]
    lines += [f"| {rules} | {summary(records)} |" for rules, records in found.items()]
    columns = list(found)
    by_name = {rules: {r["name"]: r for r in records} for rules, records in found.items()}
    lines += ["", "| operator | " + " | ".join(columns) + " |"]
    lines += ["| --- |" + " --- |" * len(columns)]
    for name in next(iter(by_name.values())):
        verdicts = [by_name[rules][name] for rules in columns]
        if any(r["verdict"] not in ("ok", "no tensor input") for r in verdicts):
            lines.append(f"| `{name}` | " + " | ".join(_cell(r) for r in verdicts) + " |")
    return "\n".join(lines) + "\n"


def _cell(record: Mapping[str, Any]) -> str:
    total = sum(record["counts"].values())
    number = record["counts"].get(record["verdict"], 0)
    return (
        record["verdict"]
        if record["verdict"] == "ok"
        else f"{record['verdict']} ({number} of {total})"
    )
