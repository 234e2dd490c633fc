"""TunedStep of a tuning: what it found, what it changed, and what that cost and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inductor_passes.tuning.outliers import Outlier

# A tuned step that takes longer than this share of the untuned one is put back.
NOISE = 1.03


def is_slower(after_us: float, before_us: float) -> bool:
    """Return whether a step became slower, by more than noise."""
    return after_us > NOISE * before_us


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What ``tune`` did; the same decision on all ranks.

    ``decision``: ``tuned``, ``put back`` (the tuned step was in another order, and slower) or ``left`` with ``why``. ``before_us``, ``after_us``:
    of a step, the median over steps of the slowest rank. ``error_before``, ``error_after``: of the predicted time of this
    rank's compiled graphs, on steps other than those that the costs are from. ``recompile_s``: seconds of steps that
    compiled, and ``recompiles`` how many such steps there were. ``slow``: ranks whose compute takes longer than the others', and
    how many times as long. ``inter_stretch``: both stretches of collectives between nodes, where there are others too.
    ``outliers``: steps, counted from 0 among those timed as scheduled, that took much longer than the others. ``left``: a line
    for each graph of the step that has no times, and why.
    """

    decision: str
    why: str = ""
    steps: int = 0
    before_us: float = 0.0
    after_us: float = 0.0
    error_before: float = 0.0
    error_after: float = 0.0
    recompiles: int = 0
    recompile_s: float = 0.0
    compute_stretch: float = 1.0
    launch_stretch: float = 1.0
    slow: Mapping[int, float] | None = None
    inter_stretch: tuple[float, float] | None = None
    outliers: tuple[Outlier, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def pays_after_steps(self) -> float:
        """Steps until the seconds of compiling are saved; infinite where nothing is."""
        saved = self.before_us - self.after_us
        return 1e6 * self.recompile_s / saved if saved > 0 else float("inf")

    def __str__(self) -> str:
        if self.decision == "left":
            return f"Schedules are left as they were: {self.why}."
        lines = [
            f"{self.decision}: a step takes {self.after_us / 1e3:.2f} ms, before {self.before_us / 1e3:.2f} ms (measured, "
            f"slowest rank, {self.steps} steps timed)",
            f"predicted times were {self.error_before:.1%} off, now {self.error_after:.1%}",
            f"{self.recompiles} recompiles took {self.recompile_s:.1f} s, which "
            + (
                f"{self.pays_after_steps:.0f} steps save"
                if self.after_us < self.before_us
                else "no step saves"
            ),
            f"beside a collective compute takes {self.compute_stretch:.2f} times as long, and a collective beside compute "
            f"{self.launch_stretch:.2f} times",
        ]
        if self.inter_stretch is not None:
            lines.append(
                "between nodes compute takes {:.2f} times as long, and a collective {:.2f} times".format(
                    *self.inter_stretch
                )
            )
        for rank, factor in sorted((self.slow or {}).items()):
            lines.append(
                f"rank {rank} is slow: its compute takes {factor:.2f} times as long as that of the others"
            )
        for each in self.outliers:
            whose = (
                f"for rank {each.rank} computed longer"
                if each.rank is not None
                else "though no rank computed longer"
            )
            lines.append(
                f"step {each.step} took {each.factor:.1f} times as long as the others, {whose}"
            )
        lines += self.left
        return "\n".join(lines)
