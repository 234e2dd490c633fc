"""Execution of a program given as plain numbers: when each entry runs and what waiting costs.

The rules: one compute stream, in order. One channel per process group, first in, first out, in order.
A launch starts when all compute before it has finished and its channel is free; it takes no compute
time. While a channel is busy, compute takes its ``stretch`` times as long, the largest of those that are busy. A wait blocks the compute stream
until its launch has finished. What is still on the wire when the compute stream has ended counts as exposed
too, so that makespan = compute + exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Program:
    """One entry per node in program order; the four lists have equal length.

    ``compute_us[i]``: time on the compute stream, after entry i has waited.
    ``channel[i]``: channel that entry i launches on, "" if it launches nothing.
    ``link_us[i]``: time of that launch on its channel.
    ``awaits[i]``: launches, by index, that entry i waits for. An entry may await itself: a collective
    that blocks.
    ``stretch``: how many times as long compute takes beside a collective; ``stretches``: on a channel of its own.
    """

    compute_us: list[float]
    channel: list[str]
    link_us: list[float]
    awaits: list[Sequence[int]]
    stretch: float = 1.0
    stretches: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Execution:
    """Times in microseconds from the start of the program.

    ``start[i]``, ``end[i]``: on the compute stream, or on its channel where entry i launches.
    ``blocked[i]``: how long entry i held up the compute stream, just before ``start[i]``.
    ``exposed[i]``: exposed time charged to launch i.
    ``compute_us``: what compute took, beside collectives and alone.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]
    blocked: tuple[float, ...]
    exposed: tuple[float, ...]
    compute_us: float
    communication_us: float
    exposed_us: float
    makespan_us: float


def execute(program: Program) -> Execution:
    """Run a program by the rules above. Linear in its entries and waits."""
    count = len(program.compute_us)
    start, end = [0.0] * count, [0.0] * count
    blocked, exposed = [0.0] * count, [0.0] * count
    clock, computed = 0.0, 0.0
    free: dict[str, float] = {}
    launches = []
    for i in range(count):
        channel = program.channel[i]
        if channel:
            launches.append(i)
            start[i] = max(clock, free.get(channel, 0.0))
            end[i] = free[channel] = start[i] + program.link_us[i]
        for launch in program.awaits[i]:
            if end[launch] > clock:
                blocked[i] += end[launch] - clock
                exposed[launch] += end[launch] - clock
                clock = end[launch]
        if not channel:
            start[i] = clock
            took = _took(program, program.compute_us[i], clock, free)
            clock += took
            computed += took
            end[i] = clock
    makespan = clock
    for launch in sorted(launches, key=end.__getitem__):
        if end[launch] > makespan:
            exposed[launch] += end[launch] - makespan
            makespan = end[launch]
    return Execution(
        start=tuple(start),
        end=tuple(end),
        blocked=tuple(blocked),
        exposed=tuple(exposed),
        compute_us=computed,
        communication_us=sum(program.link_us[i] for i in launches),
        exposed_us=sum(exposed),
        makespan_us=makespan,
    )


def _took(program: Program, us: float, clock: float, free: Mapping[str, float]) -> float:
    """Time of ``us`` of compute that starts at ``clock``, beside what was launched before."""
    if program.stretch <= 1.0 and not program.stretches:
        return us
    if not program.stretches:
        return stretched(us, max(free.values(), default=0.0) - clock, program.stretch)
    own = program.stretches
    busy = [(until - clock, own.get(channel, program.stretch)) for channel, until in free.items()]
    return stretched_by(us, busy)


def stretched(us: float, busy_us: float, stretch: float) -> float:
    """Time of ``us`` of compute that starts while channels are busy for another ``busy_us``."""
    if busy_us <= 0.0:
        return us
    return min(us * stretch, us + busy_us - busy_us / stretch)


def stretched_by(us: float, busy: Sequence[tuple[float, float]]) -> float:
    """As ``stretched``, beside several channels: for how long each is busy, and its stretch. The largest counts."""
    clock, left = 0.0, us
    for until in sorted({until for until, stretch in busy if until > 0.0 and stretch > 1.0}):
        factor = max(stretch for other, stretch in busy if other >= until)
        if left * factor <= until - clock:
            return clock + left * factor
        left -= (until - clock) / factor
        clock = until
    return clock + left
