"""Records of what an explained process has seen so far, on disk: nothing is lost if the process dies.

Each process appends lines of JSON to a file of its own, ``{"kind": KIND, "data": {...}}``. A later line
about the same thing replaces the earlier; a last line that was cut off is not read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamo_dist.diagnostics.records import PARTS, Part, RunReport
from inductor_passes.records import GraphRecord, restored

_PROCESS = ("rank", "world_size", "torch_version", "plugin_version")


class Journal:
    """Writes the file of this process; a forked child writes one of its own. Threads may share it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._process: dict[str, Any] = {}

    def process(self, **known: Any) -> None:
        """Note which process is writing: ``rank``, ``world_size``, ``torch_version``, ``plugin_version``, ``meeting``.

        ``meeting`` is ``HOST:PORT`` of the store where the ranks met, "" where there is none.
        """
        if known != self._process:
            self._process = known
            self._append("process", known)

    def record(self, record: Part) -> None:
        """Add a record, or replace the one before it."""
        kind = next(kind for kind, cls in PARTS.items() if isinstance(record, cls))
        data = record.to_json() if isinstance(record, GraphRecord) else dataclasses.asdict(record)
        self._append(kind, data)

    def _append(self, kind: str, data: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, "data": data}) + "\n"
        with (
            self._lock,
            (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file,
        ):
            file.write(line)


def read(folder: str | os.PathLike[str], default: tuple[int, int] = (0, 1)) -> list[RunReport]:
    """A report for each rank that wrote anything, by rank; processes of one rank are put together.

    A script that starts several worlds is reported as the largest of them.
    ``default``: rank and number of ranks of a process that never said, because it ended too early.
    """
    files = sorted(Path(folder).glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    by_rank: dict[int, RunReport] = {}
    for report in (_report(_lines(path), default) for path in files):
        before = by_rank.get(report.rank)
        by_rank[report.rank] = report if before is None else _together(before, report)
    world_size = max((report.world_size for report in by_rank.values()), default=1)
    return [
        dataclasses.replace(report, world_size=world_size) for _, report in sorted(by_rank.items())
    ]


def meeting(folder: str | os.PathLike[str]) -> str:
    """``HOST:PORT`` where the ranks met, as the last process that knew one says; else ""."""
    found = ""
    for path in Path(folder).glob("*.jsonl"):
        for kind, data in _lines(path):
            found = (data.get("meeting") if kind == "process" else "") or found
    return found


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the process died while it wrote
        yield entry["kind"], entry["data"]


def _report(lines: Iterable[tuple[str, Any]], default: tuple[int, int]) -> RunReport:
    process: dict[str, Any] = dict(zip(_PROCESS, default, strict=False))
    seen: dict[str, dict[Any, Any]] = {kind: {} for kind in PARTS}
    for kind, data in lines:
        if kind == "process":
            process.update({name: data[name] for name in _PROCESS if name in data})
        elif kind in PARTS:
            record = restored(PARTS[kind], data)
            seen[kind][record.key] = record
    records: dict[str, Any] = {kind: tuple(found.values()) for kind, found in seen.items()}
    topologies = dict.fromkeys(g.topology for g in records["graphs"] if g.topology)
    return RunReport(**process, **records, topology=", ".join(topologies))


def _together(one: RunReport, other: RunReport) -> RunReport:
    """Two processes of one rank; of what both measured the later counts."""
    both: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in PARTS}
    both["facts"] = tuple({fact.name: fact for fact in both["facts"]}.values())
    later = other if other.world_size >= one.world_size else one
    return dataclasses.replace(later, topology=one.topology or other.topology, **both)
