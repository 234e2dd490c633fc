"""``options={"costs": "measured"}``: what ``tune`` does, done by the program's own steps, without being called.

The first function with launches whose costs nobody has measured gives the beat: its graph's calls are counted on every rank,
and launches are in one order on all, so that the same call is the same moment of the program everywhere. Between two beats
lies one step: backward of the one call and forward of the next. All that ranks do together, they do at a beat; when it is done the
code runs as it did before, without clocks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable

from dynamo_dist.switch import is_enabled
from dynamo_dist.tuning import codes
from dynamo_dist.tuning.findings import (
    COMPILED,
    Findings,
    Outcome,
    error_of,
    evidence,
    findings,
    outcome,
    seen,
)
from dynamo_dist.tuning.meetings import LostError, Meetings, StoppedError
from dynamo_dist.tuning.report import TuneReport, is_slower
from inductor_passes.agree import orders
from inductor_passes.agree.orders import Orders
from inductor_passes.attach import measured
from inductor_passes.attach.clocked import ClockedCode, Way, clocked
from inductor_passes.machine.times.times import TunedStep
from inductor_passes.records import GraphRecord
from inductor_passes.tuning.changes import changes, is_changed

log = logging.getLogger(__name__)

# Beats before the clocks are put on, timed, and before the tuned steps are timed; how often, if steps compile meanwhile.
WARM_UP, STEPS, SETTLED, TRIES = 3, 12, 2, 2
_calls = itertools.count()
_running: list[ByItself] = []
_done: list[tuple[Orders, TuneReport]] = []


def _noted(made: codes.Noted) -> None:
    """Look at a graph that was compiled or loaded: does it give the beat, or wait for the one that did?"""
    job = orders.current()
    if made.runs != "cpu":  # no clock of the host shows when its calls end
        return
    if job is None or not measured.is_asked() or not job.can_meet():
        return
    if _running and _running[0].job is not job:
        give_up()
    if not _running and not any(known is job for known, _ in _done):
        _running.append(ByItself(job, f"by itself/{next(_calls)}"))
    for each in _running:
        each.offer(made)


codes.subscribe(_noted)


def give_up() -> None:
    """Time nothing by itself any more in this job; what has been decided stays."""
    for each in list(_running):
        each.finish(TuneReport("left", "something else was done"), quiet=True)


def report() -> TuneReport | None:
    """What came of it in this job; None before it is done."""
    job = orders.current()
    return next((found for known, found in _done if known is job), None)


class ByItself:
    """One tuning of a job, driven by the beat."""

    def __init__(self, job: Orders, name: str) -> None:
        self.job = job
        self._ranks = Meetings(job, name)
        self._place = ""
        self._offered: list[ClockedCode] = []
        self._givers: list[ClockedCode] = []
        self._clocks: codes.Clocks | None = None
        self._walls: list[float] = []
        self._beats, self._last, self._tries, self._compiled = 0, 0.0, 0, 0
        self._on_beat: Callable[[float], None] = self._warm_up
        self._recompiles, self._recompile_s = 0, 0.0

    def offer(self, noted: codes.Noted) -> None:
        """Put a beat on a graph, until its first call shows whether it is the one."""
        made = clocked(noted.call, noted.source)
        known = [each.function for each in (*self._offered, *self._givers)]
        if made is None or made.function in known:
            return
        self._offered.append(made)
        made.start("scheduled", lambda _: self._first_call(made, noted.load()))

    def _first_call(self, made: ClockedCode, record: GraphRecord | None) -> None:
        made.stop()
        if made not in self._offered:
            return
        self._offered.remove(made)
        if record is None or record.phase == "backward" or not record.place:
            return
        if not self._place and not record.is_measured:
            self._place = record.place
            self._ranks.say("place", self._place)
        if record.place == self._place:
            self._givers.append(made)
            if self._clocks is None:
                made.start("scheduled", self._beat)
            self._beat([])

    def _beat(self, _: object) -> None:
        """One call of the graph that gives the beat has ended, here and on every other rank."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        for each in self._givers:  # what is timed, clocks of their own keep
            each.calls.clear()
        self._beats += 1
        try:
            if not is_enabled():
                self.finish(TuneReport("left", "the plugin was disabled"), quiet=True)
            else:
                self._on_beat(took)
        except StoppedError as error:
            self._back_and_finish(str(error))
        except LostError:
            self.finish(TuneReport("left", "the job's store failed"), quiet=True)
            raise
        except Exception as error:  # the program's step is none of its business
            self._ranks.tell(f"costs {self._tries}", f"{type(error).__name__}: {error}")
            self._back_and_finish(f"{type(error).__name__}: {error}")
        self._last = time.perf_counter()

    def _warm_up(self, _: float) -> None:
        if self._beats >= WARM_UP:
            self._compiled = codes.compiles()
            self._put_clocks(codes.WAYS[0])
            self._on_beat = self._time

    def _put_clocks(self, way: Way) -> None:
        for each in self._givers:
            each.stop()
        self._clocks, self._walls, self._beats = codes.Clocks(), [], 0
        self._clocks.start(way, self._place, self._beat)

    def _take_clocks(self) -> codes.Clocks:
        clocks, self._clocks, self._beats = self._clocks, None, 0
        assert clocks is not None
        for each in self._givers:
            each.start("scheduled", self._beat)
        return clocks

    def _timed(self, way: Way, took: float) -> None:
        assert self._clocks is not None
        self._clocks.stop(way)
        if way == "scheduled":
            self._walls.append(1e6 * took)

    def _time(self, took: float) -> None:
        self._timed(codes.WAYS[(self._beats - 1) % 2], took)
        if self._beats < STEPS:
            assert self._clocks is not None
            self._clocks.start(codes.WAYS[self._beats % 2], self._place, self._beat)
            return
        clocks = self._take_clocks()
        if not self._ranks.all_say("place", self._place):
            why = "ranks begin with other functions, whose calls are not at one moment"
            self._ranks.tell(f"costs {self._tries}", why)
            raise StoppedError(why)
        mine = evidence(clocks, self._walls, compiled=codes.compiles() > self._compiled)
        make = functools.partial(findings, steps=STEPS, world=self._ranks.world)
        found = self._ranks.share(f"costs {self._tries}", mine, make)
        self._tries += 1
        if found.text is None and found.why == COMPILED and self._tries < TRIES:
            self._on_beat = self._warm_up
            return
        if found.text is None:
            raise StoppedError(found.why)
        self._said = Findings.of_text(found.text)
        self._error_before, self._was = error_of(clocks), clocks.records()
        self._ranks.switch(self._said.tables)
        self._on_beat = self._compiled_anew

    def _compiled_anew(self, took: float) -> None:
        if self._beats == 1:
            self._recompiles += 1
            self._recompile_s += max(0.0, took - self._said.before_us / 1e6)
        if self._beats >= SETTLED:
            self._put_clocks("scheduled")
            self._on_beat = self._look

    def _look(self, took: float) -> None:
        self._timed("scheduled", took)
        if self._beats < STEPS // 2:
            assert self._clocks is not None
            self._clocks.start("scheduled", self._place, self._beat)
            return
        clocks = self._take_clocks()
        mine = seen(self._walls, changed=is_changed(self._was, clocks.records()))
        came = Outcome.of_text(self._ranks.agreed("result", mine, outcome))
        after = came.after_us
        if came.changed and is_slower(after, self._said.before_us):
            self._ranks.back()
            self._on_beat = self._put_back
            return
        tuned = TunedStep(
            self._said.before_us, after, self._recompile_s, changes(self._was, clocks.records())
        )
        measured.keep(self._said.tables, tuned)
        self._finish("tuned", after, error_of(clocks))

    def _put_back(self, took: float) -> None:
        self._recompiles += 1
        self._recompile_s += max(0.0, took - self._said.before_us / 1e6)
        self._finish("put back", self._said.before_us, self._error_before)

    def _finish(self, decision: str, after_us: float, error_after: float) -> None:
        self.finish(
            self._said.report(
                decision,
                after_us=after_us,
                error_before=self._error_before,
                error_after=error_after,
                recompiles=self._recompiles,
                recompile_s=self._recompile_s,
            )
        )

    def _back_and_finish(self, why: str) -> None:
        self.finish(TuneReport("left", why))
        self._ranks.back()

    def finish(self, found: TuneReport, *, quiet: bool = False) -> None:
        """Take everything off the code."""
        if self._clocks is not None:
            self._clocks.stop("scheduled")
        for each in (*self._offered, *self._givers):
            each.stop()
        _running[:] = [each for each in _running if each is not self]
        _done[:] = [*_done[-1:], (self.job, found)]
        if not quiet:
            log.log(logging.WARNING if found.decision == "left" else logging.INFO, "%s", found)
