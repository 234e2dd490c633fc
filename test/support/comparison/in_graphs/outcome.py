"""Classes of rows: how a side ended beside eager mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from comparison.outcome import compare

CLASSES = ("works", "breaks", "refuses", "error", "wrong", "hangs")
BAD = ("error", "wrong", "hangs")
# Rows whose error is of torch, met by stock too, and that nothing of ours turns into a break yet.
KNOWN_ERRORS: tuple[str, ...] = ()
# Of this machine alone: where files are, addresses.
_PLACES = re.compile(
    rf"{re.escape(str(Path(__file__).parents[4]))}/|[^\s'\"(]*site-packages/|[^\s'\"(]*/lib/python[\d.]+/| at 0x[0-9a-f]+"
)


def said(text: str, limit: int = 300) -> str:
    """``text`` on one line, without what is of this machine alone."""
    text = re.sub(r"127\.0\.0\.1\]?:\d+", "127.0.0.1", _PLACES.sub("", " ".join(text.split())))
    return text[:limit]


def judged(
    records: list[dict[str, Any]], found: list[Any], truth: list[Any] | None
) -> dict[str, str]:
    """The class of a side and why; ``records`` and values by rank, ``truth`` None where eager mode raises too."""
    for record in records:
        if record["status"] == "hang":
            return {"class": "hangs", "why": record["why"]}
    failed = [record for record in records if record["status"] != "ok"]
    if failed:
        failed.sort(key=lambda record: record.get("refuses", False))
        known = truth is None or all(record.get("refuses") for record in failed)
        refuses = known and [record["status"] for record in records] == ["error"] * len(records)
        return {"class": "refuses" if refuses else "error", "why": said(failed[0]["why"])}
    if truth is not None:
        for rank, (ours, theirs) in enumerate(zip(found, truth, strict=True)):
            if problem := compare(ours, theirs, f"rank {rank}, value"):
                return {"class": "wrong", "why": problem[:300]}
    breaks = sorted({text for record in records for text in record["breaks"]})
    if breaks:
        return {"class": "breaks", "why": _PLACES.sub("", breaks[0])[:1200]}
    if not all(record["graphs"] for record in records):
        return {"class": "breaks", "why": "no graph was compiled"}
    return {"class": "works", "why": ""}
