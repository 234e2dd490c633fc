"""Where the nodes of a graph are in the code that was generated of it: between which launches and waits.

Launches, waits and products stand in generated code in the order of the graph (``pin.py``); what Inductor fuses of the
rest may stand on either side of a product, but not of a launch or wait that it depends on. So a *segment*, from one launch
or wait to the next, holds nodes of the graph and statements of the code, and a product that both have is one and
the same. What else a segment took is shared out to its other nodes, in proportion to their predicted times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inductor_passes.attach.generated_code import without_second_waits
from inductor_passes.records import NodeRecord


@dataclass(frozen=True, slots=True)
class Segment:
    """Compute between two events that launch or wait.

    ``kernels``: nodes with a kernel of their own. ``others``: fused ones. ``clocked``: the kernels' events by index,
    one for each kernel; empty where code and graph have not the same number.
    """

    kernels: tuple[NodeRecord, ...]
    others: tuple[NodeRecord, ...]
    clocked: tuple[int, ...]

    def shared(
        self,
        total_us: float,
        kernels_us: Sequence[float],
        measured_us: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Time of each node, by name; they add up to ``total_us``. Empty if the segment has no node.

        ``measured_us``: of nodes, where a profile tells them apart: what is shared out goes by these, not by predicted times.
        """
        if self.clocked:
            rest = max(0.0, total_us - sum(kernels_us))
            found = {node.name: us for node, us in zip(self.kernels, kernels_us, strict=True)}
            into = self.others or self.kernels
        else:
            rest, found, into = total_us, {}, (*self.kernels, *self.others)
        weights = {node.name: node.predicted_us for node in into}
        if not self.others and self.clocked:
            weights = dict(found)
        told = {node.name: (measured_us or {}).get(node.name, 0.0) for node in into}
        if any(told.values()):
            weights = told
        total = sum(weights.values())
        for name, weight in weights.items():
            share = weight / total if total > 0 else 1 / len(weights)
            found[name] = found.get(name, 0.0) + rest * share
        return found


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """``events``: of the generated code. ``syncs``: those that launch or wait, by index; ``numbers``: of which launch.

    One segment stands before each of ``syncs``, and one behind the last.
    """

    events: tuple[str, ...]
    syncs: tuple[int, ...]
    numbers: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def launches(self) -> dict[int, int]:
        """Index of the event by number of the launch."""
        return {
            number: at
            for number, at in zip(self.numbers, self.syncs, strict=True)
            if self.events[at].startswith("launch")
        }


def layout_of(nodes: Sequence[NodeRecord], events: Sequence[str]) -> CodeLayout | None:
    """Lay the nodes of a graph beside the events of its code; None where these are not in one order."""
    wanted = without_second_waits(_word(node) for node in nodes if _is_sync(node))
    found = without_second_waits(event for event in events if event != "kernel")
    if _numbered(found) != wanted:
        return None
    syncs: list[int] = []
    numbers: list[int] = []
    kernels: list[list[int]] = [[]]
    seen: set[str] = set()
    launched = 0
    for at, event in enumerate(events):
        if event == "kernel":
            kernels[-1].append(at)
            continue
        if event.startswith("wait") and event in seen:
            continue
        seen.add(event)
        if event.startswith("launch"):
            number, launched = launched, launched + 1
        else:
            number = int(event.split()[1])
        syncs.append(at)
        numbers.append(number)
        kernels.append([])
    segments = _segments(nodes, kernels)
    return CodeLayout(tuple(events), tuple(syncs), tuple(numbers), segments)


def _segments(nodes: Sequence[NodeRecord], kernels: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    own: list[list[NodeRecord]] = [[]]
    seen: set[str] = set()
    for node in nodes:
        if not _is_sync(node):
            if node.event != "wait":
                own[-1].append(node)
        elif node.event == "launch" or _word(node) not in seen:
            seen.add(_word(node))
            own.append([])
    made = []
    for inside, clocked in zip(own, kernels, strict=True):
        products = tuple(node for node in inside if node.event == "kernel")
        others = tuple(node for node in inside if node.event != "kernel")
        made.append(
            Segment(products, others, tuple(clocked) if len(clocked) == len(products) else ())
        )
    return tuple(made)


def _is_sync(node: NodeRecord) -> bool:
    return node.event == "launch" or (node.event == "wait" and node.number >= 0)


def _word(node: NodeRecord) -> str:
    return f"{node.event} {node.number}"


def _numbered(events: Sequence[str]) -> list[str]:
    """Events whose launches bear their number, as waits do."""
    found, count = [], 0
    for event in events:
        found.append(f"launch {count}" if event.startswith("launch") else event)
        count += event.startswith("launch")
    return found
