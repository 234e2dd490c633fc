"""Collect what compiles while a block runs: graphs, graph breaks, recompiles, plans."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynamo_dist.diagnostics import breaks as stacks
from dynamo_dist.diagnostics.breaks import CATALOG, Cause, advise, parse, without_addresses
from dynamo_dist.diagnostics.records import (
    BreakRecord,
    Effect,
    Fact,
    Part,
    PlanRecord,
    RecompileRecord,
    RunReport,
)
from dynamo_dist.torch_compat.dynamo_frames import SeenBreak, SeenCompile, watch_dynamo
from inductor_passes.report import recorder
from inductor_passes.report.recorder import Subscribers
from inductor_passes.report.report import GraphCollector

_subscribers: Subscribers[PlanRecord] = Subscribers()
# The one takes callbacks for every later plan, made or found again; the other hands a plan to them.
subscribe_to_plans, publish_plan = _subscribers.add, _subscribers.call


# Dynamo leaves such frames to Python on purpose: nothing was lost.
_NOT_FAILURES = re.compile(r"^Skip|Restart")
_LIMIT = re.compile(r"(recompile|cache) limit exceeded")
_SEVERITY: dict[Effect, int] = {"split": 0, "eager": 1, "error": 2}
_COMPILE_ID = re.compile(r"^!?\d+(?:/\d+)?(?:_\d+)?: ")


class Collector(GraphCollector):
    """The graphs, breaks, recompiles and plans seen so far. Safe to read at any time, from any
    thread.

    ``on_change`` is called with each record that is new or replaces an earlier one.
    """

    def __init__(
        self,
        catalog: Sequence[Cause] = CATALOG,
        on_change: Callable[[Part], object] = lambda record: None,
    ) -> None:
        super().__init__()
        self._catalog = tuple(catalog)
        self._on_change = on_change

    @property
    def breaks(self) -> list[BreakRecord]:
        """One record for each place and reason, with the number of times it was met."""
        return self.of(BreakRecord)

    @property
    def recompiles(self) -> list[RecompileRecord]:
        """One record for each function and guard."""
        return self.of(RecompileRecord)

    @property
    def plans(self) -> list[PlanRecord]:
        """One record for each graph that was planned."""
        return self.of(PlanRecord)

    def report(self, facts: Sequence[Fact] = ()) -> RunReport:
        """Everything seen so far with this process's rank and versions."""
        who = super().report()
        return RunReport(
            **{f.name: getattr(who, f.name) for f in dataclasses.fields(who)},
            breaks=tuple(self.breaks),
            recompiles=tuple(self.recompiles),
            plans=tuple(self.plans),
            facts=tuple(facts),
        )

    def take(self, record: Any) -> None:
        """Take a record; a later one of the same ``key`` replaces the earlier, or counts on."""
        with self._lock:
            known = self._seen.get((type(record), record.key))
            if known is not None and hasattr(record, "count"):
                record = dataclasses.replace(record, count=known.count + 1)
            if known is not None and isinstance(record, BreakRecord):
                worst = max(known.effect, record.effect, key=_SEVERITY.__getitem__)
                record = dataclasses.replace(record, effect=worst)
            self._seen[type(record), record.key] = record
            self._on_change(record)

    def on_break(self, seen: SeenBreak) -> None:
        """Take a break that Dynamo recovered from."""
        self._add_break(
            seen.message, seen.kind, seen.stack, "eager" if seen.falls_back else "split"
        )

    def on_compile(self, seen: SeenCompile) -> None:
        """Take the end of a compile: why it was a second one, and whether it failed."""
        if seen.recompile_reason and seen.function:
            self._add_recompile(seen)
        if seen.failure and not seen.reported and not _NOT_FAILURES.search(seen.failure):
            gave_up = seen.suppressed or _LIMIT.search(seen.message) is not None
            effect: Effect = "eager" if gave_up else "error"
            self._add_break(seen.message, seen.failure, seen.stack, effect)

    def _add_break(
        self,
        text: str,
        kind: str,
        stack: Sequence[traceback.FrameSummary],
        effect: Effect,
    ) -> None:
        # The first message of a chain is the cause, the later ones are what came of it.
        message = parse(text)[0]
        if not message.context and not message.hints:
            # Not in Dynamo's form: an exception's text, whose first line is no fixed name.
            message = dataclasses.replace(message, kind=kind, explanation=without_addresses(text))
        line = stacks.user_line(stack)
        advice = advise(message, stacks.call_path(stack), self._catalog)
        record = BreakRecord(
            kind=message.kind,
            reason=message.explanation,
            user_line=line,
            explanation=advice.why,
            fix=advice.fix,
            cause=advice.cause,
            effect=effect,
            hints=message.hints,
        )
        self.take(record)

    def _add_recompile(self, seen: SeenCompile) -> None:
        line = f"{seen.file}:{seen.line}" if seen.file else stacks.user_line(seen.stack)
        self.take(RecompileRecord(seen.function, line, _guard(seen.recompile_reason)))


@contextlib.contextmanager
def collect(
    catalog: Sequence[Cause] = CATALOG,
    on_change: Callable[[Part], object] = lambda record: None,
) -> Iterator[Collector]:
    """Collect while the block runs; the collector stays readable after it.

    Listens at compile time only, so compiled calls are as fast as without it. Works whatever
    TORCH_LOGS says, changes nothing that torch logs, nests, and sees compiles of every thread.
    """
    collector = Collector(catalog, on_change)
    with watch_dynamo(collector.on_break, collector.on_compile):
        unsubscribe = recorder.subscribe(collector.take)
        unsubscribe_plans = subscribe_to_plans(collector.take)
        try:
            yield collector
        finally:
            # graphs that a compile by upstream's backend took from the cache
            recorder.publish_cached()
            unsubscribe()
            unsubscribe_plans()


def explain(
    fn: Callable[..., Any], *, backend: str | Callable[..., Any] = "dynamo_dist", **options: Any
) -> Callable[..., RunReport]:
    """``explain(fn)(*args)`` compiles ``fn``, calls it once with ``args`` and returns the report.

    ``options`` are keyword arguments of ``torch.compile``. Forgets every compiled function of this
    process first (``torch.compiler.reset()``), because what is compiled already is not compiled
    again. An exception that the call raises passes through.
    """

    def explained(*args: Any, **kwargs: Any) -> RunReport:
        torch.compiler.reset()
        with collect() as collector:
            torch.compile(fn, backend=backend, **options)(*args, **kwargs)
        return collector.report()

    return explained


def _guard(reason: str) -> str:
    """The guard's expression: torch appends its source line, and puts the compile's id in front."""
    first = reason.strip().splitlines()[0]
    return _COMPILE_ID.sub("", without_addresses(first)).split("  # ", 1)[0].strip()
