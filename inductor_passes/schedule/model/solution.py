"""The answer to a schedule problem, with its certificate."""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.schedule.model.problem import Schedule


@dataclass(frozen=True, slots=True)
class Exposed:
    """A collective that is not hidden, and why.

    ``launch``: node id, the first of a bucket. ``us``: how long the compute stream waits for it.
    ``reason``: "data" (it starts as soon as what it depends on has finished), "channel" (its channel was
    busy with others from then on), "memory cap" (its result would not have fitted any earlier), "at the
    bound" (no schedule is shorter, whatever this collective does), or "order" (none of these: it could
    have started earlier, but no better schedule was found).
    """

    launch: int
    us: float
    reason: str


@dataclass(frozen=True, slots=True)
class Solution:
    """An order and buckets, and what they are worth.

    Times in microseconds. ``bound_us``: no schedule is shorter (``bound.py``). ``own_bound_us``: the
    same, sharper (``own_bound.py``). ``gap``: ``makespan_us / bound_us - 1``.
    ``cap_bytes``: the memory cap that was asked for. ``peak_bytes`` exceeds it only if the program's own
    order does and nothing leaner was found; then it is the least found. ``strategy``: what found it.
    """

    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    makespan_us: float
    bound_us: float
    own_bound_us: float
    peak_bytes: int
    cap_bytes: int
    exposed_us: float
    original_makespan_us: float
    original_peak_bytes: int
    strategy: str
    reasons: tuple[Exposed, ...]

    @property
    def gap(self) -> float:
        """Most that the makespan may be above the best possible one, as a share of the bound; 0 where it is best."""
        return self.makespan_us / self.bound_us - 1 if self.bound_us > 0 else 0.0

    @property
    def within_cap(self) -> bool:
        """False only if no schedule within the cap was found; then the peak is the least found."""
        return self.peak_bytes <= self.cap_bytes

    @property
    def schedule(self) -> Schedule:
        """Order and buckets alone."""
        return Schedule(self.order, self.buckets)
