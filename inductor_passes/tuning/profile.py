"""One call in a profile of a device -> marks as a clock of the host has them, and what each node took, by the names of kernels.

A host's clock sees launches of kernels alone; these marks are those of the stream that computes. An event of the code begins when the
stream comes to it and ends when the stream goes on. A launch that is waited for at once begins when this rank has come, which
is when the stream was done and the host had started it, whichever was later, and ends with its kernel. Of a launch that is not,
the stream sees nothing; it stands still at the wait, until that kernel's end. Time in which the stream had nothing to do, because the host
was late, counts as compute, as it does by a host's clock.

Fused kernels of Inductor bear operators in their names: each one's time goes to those nodes between the same two launches or waits.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Sequence

from inductor_passes.machine.importing.kineto_calls import Call, Kernel
from inductor_passes.records import NodeRecord
from inductor_passes.tuning.layout import CodeLayout, Segment

_FUSED = re.compile(r"triton_[a-z]+_fused_(.*?)_?[0-9]*")


class UnreadCallError(Exception):
    """A call whose kernels cannot be told apart; the message says which."""


def marks_of(layout: CodeLayout, call: Call, *, alone: bool) -> list[float]:
    """Seconds of the device's clock, as ``RankCalls`` has them. Raises UnreadCallError.

    ``alone``: whether the code waited for each launch at once.
    """
    if call.events != len(layout.events):
        raise UnreadCallError(
            f"the profile shows {call.events} of the {len(layout.events)} launches, waits and products of its code"
        )
    if not call.kernels:
        raise UnreadCallError("the profile shows nothing that it ran on the device")
    started = _by_event(call)
    sent = {at: _sent(call, started.get((at, True), ())) for at in layout.launches.values()}
    now = min(kernel.begin for kernel in call.kernels)
    marks, ends = [now], {}
    numbers = {at: number for number, at in layout.launches.items()}
    for at, event in enumerate(layout.events):
        own = started.get((at, True), ())
        now = _done(now, started.get((at, False), ()))
        if event == "kernel":
            if not own:
                raise UnreadCallError(f"{_name(layout, at)} started no kernel")
            begin = max(now, min(kernel.begin for kernel in own))
            now = _done(begin, own)
            marks += [begin, now]
        elif event.startswith("launch"):
            now = _done(now, [kernel for kernel in own if kernel not in sent[at]])
            begin, end = _launched(layout, at, sent[at], now)
            ends[numbers[at]] = end
            marks += [begin, end] if alone else [now, now]
            now = marks[-1]
        else:
            end = now if alone else ends.get(int(event.split()[1]), now)
            marks += [now, max(now, end)]
            now = marks[-1]
    marks.append(_done(now, started.get((len(layout.events), False), ())))
    return marks


def shares_of(layout: CodeLayout, call: Call) -> dict[str, float]:
    """Microseconds of nodes by name, as far as kernels' names and order say; what else ran is shared out to all of its segment."""
    kernels: list[list[Kernel]] = [[] for _ in layout.segments]
    clocked = {at for segment in layout.segments for at in segment.clocked}
    launches = set(layout.launches.values())
    for (at, inside), started in _by_event(call).items():
        if inside and at in clocked:
            continue
        sent = _sent(call, started) if inside and at in launches else ()
        into = kernels[bisect.bisect_left(layout.syncs, at)]
        into += [kernel for kernel in started if kernel not in sent]
    found: dict[str, float] = defaultdict(float)
    for segment, ran in zip(layout.segments, kernels, strict=True):
        _share_segment(found, segment, ran)
    return dict(found)


def _by_event(call: Call) -> dict[tuple[int, bool], list[Kernel]]:
    """What an event started, and what was started before it behind the one before, as ``at`` and ``inside`` say."""
    found: dict[tuple[int, bool], list[Kernel]] = {}
    for kernel in call.kernels:
        found.setdefault((kernel.at, kernel.inside), []).append(kernel)
    return found


def _done(now: float, kernels: Sequence[Kernel]) -> float:
    return max((now, *(kernel.end for kernel in kernels)))


def _sent(call: Call, started: Sequence[Kernel]) -> list[Kernel]:
    """Of what a launch started, the collective: NCCL's kernels, or, without any, what ran on no stream that computes."""
    named = [kernel for kernel in started if kernel.is_nccl]
    if named:
        return named
    computing = {kernel.stream for kernel in call.kernels if not kernel.inside}
    return [kernel for kernel in started if computing and kernel.stream not in computing]


def _launched(
    layout: CodeLayout, at: int, sent: Sequence[Kernel], now: float
) -> tuple[float, float]:
    if not sent:
        raise UnreadCallError(f"{_name(layout, at)} started no kernel of a collective")
    kind = layout.events[at].split()[1]
    others = {kernel.collective for kernel in sent} - {kind, ""}
    if others:
        raise UnreadCallError(f"{_name(layout, at)} started a kernel of {min(others)}")
    begin = min(kernel.begin for kernel in sent)
    came = max(now, min(begin, min(kernel.started for kernel in sent)))
    return came, max(came, max(kernel.end for kernel in sent))


def _name(layout: CodeLayout, at: int) -> str:
    """Name an event by its kind and its number among those of its kind."""
    word = layout.events[at]
    kind = "launch" if word.startswith("launch") else "product"
    same = [i for i, event in enumerate(layout.events) if event.startswith(word.split()[0])]
    return f"{kind} {same.index(at)}" + (f" ({word.split()[1]})" if kind == "launch" else "")


def _share_segment(found: dict[str, float], segment: Segment, kernels: Sequence[Kernel]) -> None:
    into = segment.others
    if not segment.clocked:
        products = [kernel for kernel in kernels if kernel.product]
        if len(products) == len(segment.kernels):
            for node, kernel in zip(segment.kernels, products, strict=True):
                found[node.name] += kernel.us
            kernels = [kernel for kernel in kernels if not kernel.product]
        else:
            into = (*segment.kernels, *segment.others)
    for kernel in kernels:
        fused = [node for node in segment.others if _is_fused(node, kernel.name)]
        _share(found, fused or into, kernel.us)


def _is_fused(node: NodeRecord, kernel: str) -> bool:
    match = _FUSED.fullmatch(kernel)
    if match is None:
        return False
    parts = node.operator.split(".")
    return f"_{parts[1] if len(parts) > 1 else parts[0]}_" in f"_{match[1]}_"


def _share(found: dict[str, float], nodes: Sequence[NodeRecord], us: float) -> None:
    """Share a time out to nodes, in proportion to their predicted ones."""
    total = sum(node.predicted_us for node in nodes)
    for node in nodes:
        found[node.name] += us * (node.predicted_us / total if total > 0 else 1 / len(nodes))
