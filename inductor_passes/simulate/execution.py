"""Execution of a program given as plain numbers: when each entry runs and what waiting costs.

The rules: one compute stream, in order. One channel per process group, first in, first out, in order; those of a
group and of its clone share one link (``links.py``).
A launch starts when all compute before it has finished and its channel is free; it takes no compute
time. While a channel is busy, compute takes its ``stretch`` times as long, the largest of those that are busy. A wait blocks the compute stream
until its launch has finished. What is still on the wire when the compute stream has ended counts as exposed
too, so that makespan = compute + exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inductor_passes.simulate.links import SharedLink


@dataclass(frozen=True, slots=True)
class Program:
    """One entry per node in program order; the four lists have equal length.

    ``compute_us[i]``: time on the compute stream, after entry i has waited.
    ``channel[i]``: channel that entry i launches on, "" if it launches nothing.
    ``link_us[i]``: time of that launch on its channel.
    ``awaits[i]``: launches, by index, that entry i waits for. An entry may await itself: a collective
    that blocks.
    ``stretch``: how many times as long compute takes beside a collective; ``stretches``: on a channel of its own.
    ``shared``: the link of each channel that shares one with another. ``startup_us[i]``: of a launch there, the part of
    ``link_us[i]`` in which it moves no bytes.
    """

    compute_us: list[float]
    channel: list[str]
    link_us: list[float]
    awaits: list[Sequence[int]]
    stretch: float = 1.0
    stretches: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    startup_us: Mapping[int, float] = field(default_factory=dict)


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
    links = {name: SharedLink() for name in program.shared.values()}
    launches = []
    for i in range(count):
        channel = program.channel[i]
        if channel:
            launches.append(i)
        if channel in program.shared:
            startup = program.startup_us.get(i, 0.0)
            links[program.shared[channel]].launch(
                i, channel, clock, startup, program.link_us[i] - startup
            )
        elif channel:
            start[i] = max(clock, free.get(channel, 0.0))
            end[i] = free[channel] = start[i] + program.link_us[i]
        for launch in program.awaits[i]:
            if program.channel[launch] in program.shared:
                end[launch] = links[program.shared[program.channel[launch]]].end_of(launch)
            if end[launch] > clock:
                blocked[i] += end[launch] - clock
                exposed[launch] += end[launch] - clock
                clock = end[launch]
        if not channel:
            start[i] = clock
            took = _took(program, program.compute_us[i], clock, free, links)
            clock += took
            computed += took
            end[i] = clock
    for link in links.values():
        link.drain()
        for i, at in link.start.items():
            start[i], end[i] = at, link.end[i]
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


def _took(
    program: Program,
    us: float,
    clock: float,
    free: Mapping[str, float],
    links: Mapping[str, SharedLink],
) -> float:
    """Time of ``us`` of compute that starts at ``clock``, beside what was launched before."""
    if program.stretch <= 1.0 and not program.stretches:
        return us
    if not program.stretches:
        idle = [*free.values(), *(link.idle_at() for link in links.values())]
        return stretched(us, max(idle, default=0.0) - clock, program.stretch)
    factor = {c: program.stretches.get(c, program.stretch) for c in (*free, *program.shared)}
    busy = [(until - clock, factor[channel]) for channel, until in free.items()]
    for name, link in links.items():
        most = max(factor[channel] for channel, of in program.shared.items() if of == name)
        busy.append((link.idle_at() - clock, most))
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
