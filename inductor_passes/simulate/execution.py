"""Execute a program given as plain numbers: when each entry runs, what waiting costs, how much
memory is live.

The rules: one compute stream, in order. One channel per process group, first in, first out, in
order. A launch starts when all compute before it has finished and its channel is free; it takes no
compute time. While a channel is busy, compute takes ``stretch`` times as long. A wait blocks the
compute stream until its launch has finished. What is still on the wire when the compute stream has
ended counts as exposed too, so that makespan = compute + exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def live_bytes(fresh_bytes: Sequence[int], last_use: Sequence[int]) -> list[int]:
    """Bytes alive while each entry of a program runs.

    ``fresh_bytes[i]``: bytes that entry i brings to life, 0 for a view or an input; they are freed
    after entry ``last_use[i]``, at the earliest i.
    """
    freed = [0] * len(fresh_bytes)
    for size, i in zip(fresh_bytes, last_use, strict=True):
        freed[i] += size
    live = 0
    during = []
    for fresh, gone in zip(fresh_bytes, freed, strict=True):
        live += fresh
        during.append(live)
        live -= gone
    return during


@dataclass(frozen=True, slots=True)
class Program:
    """One entry per node in program order; the four lists have equal length.

    ``compute_us[i]``: time on the compute stream, after entry i has waited.
    ``channel[i]``: channel that entry i launches on, "" if it launches nothing.
    ``link_us[i]``: time of that launch on its channel.
    ``awaits[i]``: launches, by index, that entry i waits for. An entry may await itself: a
        collective that blocks.
    ``stretch``: how many times as long compute takes beside a collective.
    """

    compute_us: list[float]
    channel: list[str]
    link_us: list[float]
    awaits: list[Sequence[int]]
    stretch: float = 1.0


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
    # First in, first out: the time at which a channel has done all that it was given.
    free: dict[str, float] = {}
    launches = []
    for i in range(count):
        channel = program.channel[i]
        if channel:
            launches.append(i)
            start[i] = max(clock, free.get(channel, 0.0))
            end[i] = free[channel] = start[i] + program.link_us[i]
        for launch in program.awaits[i]:
            # Charged to the launch only as far as nothing else was waited for at the same time:
            # exposed times then add up to the idle time of the stream.
            if end[launch] > clock:
                blocked[i] += end[launch] - clock
                exposed[launch] += end[launch] - clock
                clock = end[launch]
        if not channel:
            start[i] = clock
            took = stretched(
                # All channels count alike: a collective of any group takes memory bandwidth and
                # multiprocessors from the kernel beside it.
                program.compute_us[i],
                max(free.values(), default=0.0) - clock,
                program.stretch,
            )
            clock += took
            computed += took
            end[i] = clock
    # What is still on the wire at the end delays the step as a wait at its end would.
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


def stretched(us: float, busy_us: float, stretch: float) -> float:
    """Time of ``us`` of compute that starts while channels are busy for another ``busy_us``."""
    if busy_us <= 0.0 or stretch <= 1.0:
        return us
    # Either it ends while the link is busy and takes ``stretch`` times as long, or ``busy_us /
    # stretch`` of it is done by then and the rest runs at full speed.
    return min(us * stretch, us + busy_us - busy_us / stretch)
