"""Predict what is alive, in bytes, while a step runs in its own order and computes values again.

A graph's edit, made on numbers: each value that runs again is made anew just before the first node
of the backward that needs it, and lives until the last one there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from inductor_passes.graph.collectives import is_wait, launch_of
from inductor_passes.rewrite.rematerialize import Border
from inductor_passes.simulate.execution import live_bytes
from inductor_passes.simulate.timeline import memory_owners, value_bytes


class Liveness:
    """The bytes of a graph's values, in the order of the program. Inputs are not counted."""

    def __init__(self, graph: fx.Graph, borders: Sequence[Border]) -> None:
        nodes = list(graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        self._owner = memory_owners(graph)
        self._bytes = [
            value_bytes(node) if self._owner[i] == i else 0 for i, node in enumerate(nodes)
        ]
        self._reads: list[tuple[int, ...]] = []
        for node in nodes:
            reads = dict.fromkeys(node.all_input_nodes)
            if is_wait(node) and (launch := launch_of(node)) is not None:
                reads |= dict.fromkeys(launch.all_input_nodes)  # the link reads them until then
            self._reads.append(tuple(place[each] for each in reads))
        # The border at whose backward a node stands, and at whose forward.
        self._border_behind = [-1] * len(nodes)
        self._border_ahead = [-1] * len(nodes)
        for number, border in enumerate(borders):
            for node in border.backward:
                self._border_behind[place[node]] = number
            for node in border.forward:
                self._border_ahead[place[node]] = number
        self.place = place

    def bytes_over_time(
        self,
        again: Collection[int],
        moved: Collection[int] = (),
        beside: Iterable[tuple[int, int, int]] = (),
    ) -> list[int]:
        """Return what is alive while each node runs, those that run again included.

        ``again``: places of nodes of forwards that their backward does not find kept; ``moved``: of
        those that it reads from the host. They are back just before they are read, and gone when
        the forward has read them. ``beside``: bytes that no node makes, and the first and the last
        place where they are alive; negative for an input's memory that is free.
        """
        fresh: list[int] = []
        last: list[int] = []  # by entry, the one that reads it last
        entries: dict[int, int] = {}  # of a node, the entry that holds its memory
        copies: dict[int, int] = {}
        begins = defaultdict[int, list[tuple[int, int]]](list)
        for size, first, end in beside:
            begins[first].append((size, end))
        ends = defaultdict[int, list[int]](list)

        def held(i: int, border: int) -> int:
            copied = border >= 0 and self._border_ahead[i] == border and i in copies
            return copies[i] if copied else entries[i]

        def run(i: int, border: int, *, comes_back: bool = False) -> int:
            at = len(fresh)
            fresh.append(self._bytes[i])
            last.append(at)
            for source in () if comes_back else self._reads[i]:
                last[held(source, border)] = at
            owner = self._owner[i]
            return at if owner == i else held(owner, border)

        for i in range(len(self._reads)):
            for size, end in begins.get(i, ()):
                ends[end].append(len(fresh))
                fresh.append(size)
                last.append(0)  # until it ends
            border = self._border_behind[i]
            if border >= 0:
                for source in self._missing(i, border, again, moved, copies):
                    copies[source] = run(source, border, comes_back=source in moved)
            entries[i] = run(i, border)
            for at in ends.get(i, ()):
                last[at] = len(fresh) - 1
        return live_bytes(fresh, last)

    def _missing(
        self,
        i: int,
        border: int,
        again: Collection[int],
        moved: Collection[int],
        copies: Collection[int],
    ) -> Iterator[int]:
        """What has to run again or come back before node ``i`` runs, inputs first."""
        pending = [(source, False) for source in reversed(self._reads[i])]
        seen: set[int] = set()
        while pending:
            source, has_inputs = pending.pop()
            if has_inputs:
                yield source
            elif (
                (source in again or source in moved)
                and source not in copies
                and source not in seen
                and self._border_ahead[source] == border
            ):
                seen.add(source)
                pending.append((source, True))
                if source in again:
                    pending += [(each, False) for each in reversed(self._reads[source])]
