"""Collect, inside an explained process, what it compiles, and keep a journal of it on disk.

``import torch`` calls ``install()`` where the environment names a folder; so processes that the
script starts are explained too. The script's own behaviour stays: without ``BACKEND`` Inductor's
configuration has one more pass, which looks at graphs and changes none.

Each process appends lines of JSON to a file of its own, ``{"kind": KIND, "data": {...}}``. A later
line about the same thing replaces the earlier; a last line that was cut off is not read.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.diagnostics import live
from dynamo_dist.diagnostics.collector import collect
from dynamo_dist.diagnostics.records import PARTS, Fact, Part, RunReport
from dynamo_dist.torch_compat import dynamo_compiler
from dynamo_dist.torch_compat.dynamo_compiler import before_first_compile
from dynamo_dist.torch_compat.dynamo_frames import SeenCompile, watch_dynamo
from inductor_passes.records import GraphRecord, restored
from inductor_passes.report import recorder
from inductor_passes.torch_compat import compile_times

_PROCESS = ("rank", "world_size", "torch_version", "plugin_version")


class Journal:
    """Writes the file of this process; a forked child writes one of its own. Threads may share
    it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._process: dict[str, object] = {}

    def process(self, **known: object) -> None:
        """Note which process is writing: ``rank``, ``world_size``, ``torch_version``,
        ``plugin_version``, ``meeting``.

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

    def _append(self, kind: str, data: Mapping[str, object]) -> None:
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
    seen: dict[str, dict[object, object]] = {kind: {} for kind in PARTS}
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


class Listener:
    """Everything seen goes to the journal at once; what is known at the end, at the end."""

    def __init__(self, folder: str) -> None:
        self._journal = Journal(folder)
        self._place = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._is_launched = self._place[1] > 1
        self._meeting = ""
        self._functions: set[tuple[str, str, int]] = set()
        self._listening = contextlib.ExitStack()

    def start(self) -> None:
        """Listen from now on until the process ends."""
        self._listening.enter_context(collect(on_change=self._on_change))
        self._listening.enter_context(watch_dynamo(lambda seen: None, self._on_compile))
        for patch in live.patches():
            patch.apply()
        self._say_who()
        atexit.register(self._finish)

    def _on_change(self, record: Part) -> None:
        self._say_who()
        self._journal.record(record)

    def _on_compile(self, seen: SeenCompile) -> None:
        """Graphs that upstream's backend took from its cache are known now."""
        recorder.publish_cached(lambda record: f"{seen.compile_id}:{record.phase}")
        if not seen.failure:
            self._functions.add((seen.function, seen.file, seen.line))
            self._journal.record(Fact("functions compiled", len(self._functions), "", "counted"))

    def _say_who(self) -> None:
        """A launcher's rank and number of ranks; without one the process group's, also when it
        is gone.
        """
        if dist.is_available() and dist.is_initialized():
            self._meeting = dynamo_compiler.meeting_point()
            if not self._is_launched:
                self._place = dist.get_rank(), dist.get_world_size()
        rank, size = self._place
        self._journal.process(
            rank=rank,
            world_size=size,
            torch_version=torch.__version__,
            plugin_version=dynamo_dist.__version__,
            meeting=self._meeting,
        )

    def _finish(self) -> None:
        self._listening.close()
        for stage, seconds in compile_times.seconds_by_stage().items():
            fact = Fact(f"compile time, {stage}", round(seconds, 2), "s", "measured")
            self._journal.record(fact)
        for device, peak in dynamo_compiler.peak_device_bytes().items():
            fact = Fact(f"peak memory of tensors on {device}", peak, "bytes", "measured")
            self._journal.record(fact)
        # Kibibytes, but bytes on macOS.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resident *= 1 if sys.platform == "darwin" else 1024
        self._journal.record(Fact("peak memory of the process", resident, "bytes", "measured"))


FOLDER = "DYNAMO_DIST_EXPLAIN"
BACKEND = "DYNAMO_DIST_EXPLAIN_BACKEND"

log = logging.getLogger(__name__)


def install() -> None:
    """Start to listen when the script first compiles. Called once, at the end of ``import
    torch``.
    """
    before_first_compile(_listen)


def _listen() -> None:
    """Start to listen; whatever is wrong with us, the script goes on."""
    try:
        if backend := os.environ.get(BACKEND, ""):
            dynamo_compiler.compile_by_default_with(backend)
        else:
            # Inductor is slow to import: a launcher or a data loader, which compiles nothing,
            # does without.
            from inductor_passes.inductor.options import observer

            dynamo_compiler.observe_inductor(observer())
        Listener(os.environ[FOLDER]).start()
    except Exception as error:
        log.warning("This process is not explained: %s: %s", type(error).__name__, error)
