"""Collects what an explained process compiles, and keeps the journal of it."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys

import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.cli.explain.journal import Journal
from dynamo_dist.diagnostics import live
from dynamo_dist.diagnostics.collect import collect
from dynamo_dist.diagnostics.records import Fact, Part
from dynamo_dist.torch_compat import dynamo_compiler
from dynamo_dist.torch_compat.dynamo_watching import SeenCompile, watch_dynamo
from inductor_passes.report import recorder


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
        for change in live.changes():
            change.apply()
        self._say_who()
        atexit.register(self._finish)

    def _on_change(self, record: Part) -> None:
        self._say_who()
        self._journal.record(record)

    def _on_compile(self, seen: SeenCompile) -> None:
        """Graphs that stock's backend took from its cache are known now."""
        recorder.publish_cached(lambda record: f"{seen.compile_id}:{record.phase}")
        if not seen.failure:
            self._functions.add((seen.function, seen.file, seen.line))
            self._journal.record(Fact("functions compiled", len(self._functions), "", "counted"))

    def _say_who(self) -> None:
        """A launcher's rank and number of ranks; without one the process group's, also when it is gone."""
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
        for device, peak in dynamo_compiler.peak_device_bytes().items():
            fact = Fact(f"peak memory of tensors on {device}", peak, "bytes", "measured")
            self._journal.record(fact)
        # Kibibytes, but bytes on macOS.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resident *= 1 if sys.platform == "darwin" else 1024
        self._journal.record(Fact("peak memory of the process", resident, "bytes", "measured"))
