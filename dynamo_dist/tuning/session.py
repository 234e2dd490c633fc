"""Time the job's own steps, agree over ranks, schedule again, and look whether it was worth it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping

from dynamo_dist.errors import TuneError
from dynamo_dist.switch import is_enabled
from dynamo_dist.tuning import by_itself, codes, profiled
from dynamo_dist.tuning.findings import (
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
from inductor_passes.attach.clocked import Way
from inductor_passes.machine.times.times import TunedStep
from inductor_passes.tuning import probes
from inductor_passes.tuning.changes import changes, is_changed

log = logging.getLogger(__name__)

# Steps that may compile before those that are timed.
WARM_UP = 3
_PROFILED = "profiled"
_calls = itertools.count()


def tune(step: Callable[[], object], steps: int = 20) -> TuneReport:
    """Time ``steps`` calls of ``step``, schedule its compiled graphs again by what they took, and report.

    Every rank of the job calls this, at the same point of the program, as often as the others, with a step that does what
    the program's steps do: it is called up to ``2 * steps + 6`` times, or 10 if that is more, and nothing else changes the program's state. In
    some timed calls launches are waited for at once, so that each is timed by itself; on the CPU what was launched with
    payloads of one size alone is launched, six times, with another one too, on zeros. All ranks switch together or
    none does; if the tuned step is slower and in another order, all go back. Times are kept beside the compile cache, for jobs with
    ``options={"costs": "measured"}``. Graphs on the CPU are timed by the host's clock, in every other call so; those on CUDA by
    torch.profiler, in two of three, while the third, without it, shows what a step takes. What a profile does not tell
    apart, and what CUDA graphs replay, is left as it was, and the report says so.

    Raises TuneError for ``steps`` below 1, for a step that still compiles when it is called the third time, where there are no ranks to agree with, and on a rank whose store fails again and
    again while the others may go on: it launches nothing from compiled graphs any more. What ``step`` raises leaves the
    schedules as they were, on all ranks.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise TuneError(
            f"tune() was told to time {steps!r} steps.", "", "Give a whole number from 1 on."
        )
    job = orders.current()
    if job is None or not is_enabled():
        raise TuneError(
            "tune() found nothing to tune.",
            "It times graphs that backend='dynamo_dist' has compiled for ranks that are processes of their own.",
            "Call it after init_process_group, with a step whose model is compiled so.",
        )
    if not job.can_meet():
        return _left(
            "ranks cannot meet: the job has no store, or DYNAMO_DIST_AGREEMENT_SECONDS is 0"
        )
    by_itself.give_up()
    return _Tuning(job, step, steps, f"tune/{next(_calls)}").run()


class _Tuning:
    def __init__(self, job: Orders, step: Callable[[], object], steps: int, name: str) -> None:
        self.ranks, self.step, self.steps = Meetings(job, name), step, steps
        self.recompiles, self.recompile_s = 0, 0.0
        self.profiled = False  # a graph of some rank's is

    def run(self) -> TuneReport:
        try:
            return self._tune()
        except StoppedError as error:
            self.ranks.back()
            return _left(str(error))
        except LostError:
            raise
        except BaseException:
            self.ranks.back()
            raise

    def _tune(self) -> TuneReport:
        ranks = self.ranks
        with ranks.told("probes"):
            self._warm_up()
            clocks, walls = self._timed(self.steps, alone=True)
            wanted = [] if self.profiled else probes.wanted(clocks.records())
        planned = self._planned(wanted)
        with ranks.told("costs"):
            mine = evidence(clocks, walls, probed=self._probed(planned))
        make = functools.partial(findings, steps=self.steps, world=ranks.world, planned=planned)
        said = Findings.of_text(ranks.agreed("costs", mine, make))
        error_before, was = error_of(clocks), clocks.records()
        ranks.switch(said.tables)
        with ranks.told("result"):
            self._compile()
            # In turn as before: what a step leaves behind, as a link that is idle meanwhile, is part of the next one's time.
            steps = max(2, self.steps // 2) if self.profiled else self.steps
            clocks, walls = self._timed(steps, alone=not self.profiled)
        mine = seen(walls, changed=is_changed(was, clocks.records()))
        came = Outcome.of_text(ranks.agreed("result", mine, outcome))
        after, error_after, decision = came.after_us, error_of(clocks), "tuned"
        if came.changed and is_slower(after, said.before_us):
            ranks.back()
            with ranks.told("back"):
                self._compile()
            decision, after, error_after = "put back", said.before_us, error_before
        else:
            lines = changes(was, clocks.records())
            measured.keep(said.tables, TunedStep(said.before_us, after, self.recompile_s, lines))
        report = said.report(
            decision,
            after_us=after,
            error_before=error_before,
            error_after=error_after,
            recompiles=self.recompiles,
            recompile_s=self.recompile_s,
        )
        log.info("%s", report)
        return report

    def _step(self, settle: Callable[[], None] = lambda: None) -> float:
        """Run one step, as all ranks do now, and return its seconds, ``settle`` included; not if one of them cannot."""
        said = self.ranks.before_step(_PROFILED if self.profiled else "")
        self.profiled = said == _PROFILED
        start = time.perf_counter()
        self.step()
        settle()
        return time.perf_counter() - start

    def _warm_up(self) -> None:
        for _ in range(WARM_UP):
            before = codes.compiles()
            self._step()
            if codes.compiles() == before:
                return
        raise TuneError(
            f"The step still compiled in its call {WARM_UP}.",
            "What is compiled anew in each step has no times.",
            "TORCH_LOGS=recompiles says why it is.",
        )

    def _planned(self, wanted: list[probes.Probe]) -> list[probes.Probe]:
        """What ranks launch beside the steps, the same on all."""

        def make(of_ranks: Mapping[int, str]) -> str:
            listed = {
                rank: [probes.Probe.from_json(each) for each in json.loads(text)]
                for rank, text in of_ranks.items()
            }
            return json.dumps([probe.to_json() for probe in probes.plan(listed)])

        mine = json.dumps([probe.to_json() for probe in wanted])
        return [
            probes.Probe.from_json(each)
            for each in json.loads(self.ranks.agreed("probes", mine, make))
        ]

    def _probed(self, planned: list[probes.Probe]) -> Mapping[int, probes.Spans]:
        """Launch what all have planned, as a step of its own."""
        if not planned:
            return {}
        self.ranks.before_step()
        return probes.run(planned, self.ranks.rank)

    def _timed(self, steps: int, *, alone: bool) -> tuple[codes.Clocks, list[float]]:
        """Clocks of steps, in turn alone and scheduled, and microseconds on the wall of those that are scheduled.

        A profiler makes steps longer: where one is needed, steps without it are in turn too, and show the wall's time.
        """
        clocks, walls = codes.Clocks(profiled.Profiler()), []
        self.profiled = self.profiled or clocks.is_profiling
        number, ways = 0, self._ways(alone=alone)
        while number < max(steps, len(ways)):
            way = ways[number % len(ways)]
            if way is not None:
                clocks.start(way)
            try:
                took = self._step(clocks.wait)
            finally:
                if way is not None:
                    clocks.stop(way)
            ways = self._ways(alone=alone)  # as all ranks go on, whatever graphs this one has
            if way == ways[-1]:
                walls.append(1e6 * took)
            number += 1
        return clocks, walls

    def _ways(self, *, alone: bool) -> list[Way | None]:
        """How steps are timed in turn; None: by the wall alone."""
        ways: list[Way | None] = ["alone", "scheduled"] if alone else ["scheduled"]
        return [*ways, None] if self.profiled else ways

    def _compile(self) -> None:
        """Run a step that compiles."""
        before = codes.compiles()
        took = self._step()
        if codes.compiles() > before:
            self.recompiles += 1
            self.recompile_s += took


def _left(why: str) -> TuneReport:
    log.warning("tune() leaves the schedules as they were: %s.", why)
    return TuneReport("left", why)
