"""Time the job's own steps, agree over ranks, schedule again, and look whether it was worth it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dynamo_dist.errors import TuneError
from dynamo_dist.switch import is_enabled
from dynamo_dist.tuning import codes
from dynamo_dist.tuning.report import TuneReport
from inductor_passes.agree import orders
from inductor_passes.agree.orders import Orders
from inductor_passes.agree.share import Shared, fail, share
from inductor_passes.agree.store import StoreFailedError
from inductor_passes.attach import measured
from inductor_passes.machine.times.file import of_text, to_text
from inductor_passes.machine.times.times import Times
from inductor_passes.torch_compat import c10d
from inductor_passes.tuning.table import merged, pack, unpack

log = logging.getLogger(__name__)

# Steps that may compile before those that are timed.
WARM_UP = 3
# A tuned step that takes longer than this share of the untuned one is put back.
NOISE = 1.03
_calls = itertools.count()


def tune(step: Callable[[], object], steps: int = 20) -> TuneReport:
    """Time ``steps`` calls of ``step``, schedule its compiled graphs again by what they took, and report.

    Every rank of the job calls this, at the same point of the program, as often as the others, with a step that does what
    the program's steps do: it is called up to ``2 * steps + 6`` times, and nothing else changes the program's state. In
    every other timed call launches are waited for at once, so that each is timed by itself. All ranks switch together or
    none does; if the tuned step is slower, all go back. Times are kept beside the compile cache, for jobs with
    ``options={"costs": "measured"}``. Graphs on the CPU are timed; those on other devices, whose kernels run on when their
    launch returns, are left as they are.

    Raises TuneError for ``steps`` below 1 and where there are no ranks to agree with; what ``step`` raises leaves the
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
    return _Tuning(job, step, steps, f"tune/{next(_calls)}").run()


class _StoppedError(Exception):
    """Another rank cannot go on."""


class _Tuning:
    def __init__(self, job: Orders, step: Callable[[], object], steps: int, name: str) -> None:
        self.job, self.step, self.steps, self.name = job, step, steps, name
        self.rank, self.world = c10d.global_rank(), c10d.world_size() or 1
        self.recompiles, self.recompile_s = 0, 0.0
        self.meetings = 0

    def run(self) -> TuneReport:
        old = dict(measured.adopted())
        switched = False
        try:
            with self._told("costs"):
                self._warm_up()
                clocks, walls = self._timed(self.steps, alone=True)
                mine = json.dumps({"walls": walls, "graphs": pack(clocks.calls())})
            found = self._share("costs", mine, self._tables)
            if found.text is None:
                return _left(found.why)
            said = json.loads(found.text)
            tables = {place: of_text(text) for place, text in said["tables"].items()}
            error_before = _error(clocks)
            switched = True
            self._switch(tables, "tuned")
            with self._told("result"):
                self._compile()
                clocks, walls = self._timed(max(2, self.steps // 2), alone=False)
            result = self._share("result", json.dumps(walls), _slowest)
            before, after = said["before_us"], float(result.text or "inf")
            error_after, decision = _error(clocks), "tuned"
            if after > NOISE * before:
                self._switch(old, "back")
                with self._told("back"):
                    self._compile()
                decision, after, error_after = "put back", before, error_before
            else:
                measured.keep(tables)
        except _StoppedError as error:
            if switched:
                self._switch(old, "stopped")
            return _left(str(error))
        except BaseException:
            if switched:
                self._switch(old, "stopped")
            raise
        a_table = next(iter(tables.values()))
        report = TuneReport(
            decision,
            steps=self.steps,
            before_us=before,
            after_us=after,
            error_before=error_before,
            error_after=error_after,
            recompiles=self.recompiles,
            recompile_s=self.recompile_s,
            compute_stretch=a_table.compute_stretch,
            launch_stretch=a_table.launch_stretch,
            slow={int(rank): factor for rank, factor in said["slow"].items()},
        )
        log.info("%s", report)
        return report

    def _step(self) -> float:
        """Run one step, as all ranks do now, and return its seconds; not if one of them cannot."""
        met = self._share(self._meeting, "", lambda _: "")
        self.meetings += 1
        if met.text is None:
            raise _StoppedError(met.why)
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    @property
    def _meeting(self) -> str:
        return f"step {self.meetings}"

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

    def _timed(self, steps: int, *, alone: bool) -> tuple[codes.Clocks, list[float]]:
        """Clocks of steps, in turn alone and scheduled, and microseconds on the wall of those that are scheduled."""
        clocks, walls = codes.Clocks(), []
        for number in range(steps + 1 if alone and steps == 1 else steps):
            way = codes.WAYS[number % 2 if alone else 1]
            clocks.start(way)
            try:
                took = self._step()
            finally:
                clocks.stop(way)
            if way == "scheduled":
                walls.append(1e6 * took)
        return clocks, walls

    def _switch(self, tables: Mapping[str, Times], word: str) -> None:
        """Price by other costs from the next call on, as all ranks do now."""
        measured.adopt(tables)
        try:
            self.job.begin_anew(f"{self.name}/{word}")
        except StoreFailedError as error:
            log.warning("Schedules are settled anew by a store that fails (%s).", error)

    def _compile(self) -> None:
        """Run a step that compiles."""
        before = codes.compiles()
        took = self._step()
        if codes.compiles() > before:
            self.recompiles += 1
            self.recompile_s += took

    def _tables(self, of_ranks: Mapping[int, str]) -> str:
        data = {rank: json.loads(text) for rank, text in of_ranks.items()}
        found = merged(
            {rank: unpack(each["graphs"]) for rank, each in data.items()}, self.steps, self.world
        )
        if not found.tables:
            raise ValueError("the step runs no compiled graph whose launches can be timed")
        walls = {rank: json.dumps(each["walls"]) for rank, each in data.items()}
        return json.dumps(
            {
                "tables": {place: to_text(times) for place, times in found.tables.items()},
                "slow": found.slow,
                "before_us": float(_slowest(walls)),
            }
        )

    def _share(self, what: str, mine: str, make: Callable[[Mapping[int, str]], str]) -> Shared:
        name = f"{self.name}/{what}"
        try:
            return self.job.ask(share(self.rank, self.world, name, mine, make))
        except StoreFailedError as error:
            return Shared(None, f"the job's store failed ({error})")

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Let the other ranks know if the block fails here, so that they do not wait for this one."""
        try:
            yield
        except _StoppedError:
            raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            for where in (what, self._meeting):
                with contextlib.suppress(StoreFailedError):
                    self.job.ask(fail(self.rank, f"{self.name}/{where}", why))
            raise


def _left(why: str) -> TuneReport:
    log.warning("tune() leaves the schedules as they were: %s.", why)
    return TuneReport("left", why)


def _slowest(of_ranks: Mapping[int, str]) -> str:
    """The median over steps of the slowest rank of each."""
    walls: list[list[float]] = [json.loads(text) for text in of_ranks.values()]
    return str(statistics.median(map(max, zip(*walls, strict=False))))


def _error(clocks: codes.Clocks) -> float:
    """How far the predicted times of this rank's graphs, scheduled, are from those measured, together."""
    measured_us: Any = {name: us for name, us in clocks.us("scheduled").items() if us}
    took = sum(statistics.median(us) for us in measured_us.values())
    said = sum(us for name, us in clocks.predicted_us().items() if name in measured_us)
    return abs(said / took - 1) if took else 0.0
