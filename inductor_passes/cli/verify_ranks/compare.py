"""Comparison of what several ranks launch: equal sequences in every group, and an order without a cycle.

Ranks match the collectives of a group by order alone, so two members whose sequences differ hang, or
mix up their data. Across groups, ranks may interleave as they like, as long as the launches together
have an order that suits everybody: a cycle is a deadlock.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerLaunch:
    """One launch as its peers see it. ``ranks``: the group's global ranks; bytes are of this rank's input."""

    operation: str
    ranks: tuple[int, ...]
    payload_bytes: int
    dtype: str
    reduce_op: str | None

    def __str__(self) -> str:
        operation = (
            self.operation if self.reduce_op is None else f"{self.operation} {self.reduce_op}"
        )
        return f"{operation} of {self.payload_bytes} bytes, {self.dtype}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first launch, counted from 0, at which members of one group part; None where one has ended."""

    graph: str
    group: tuple[int, ...]
    index: int
    launches: tuple[tuple[tuple[int, ...], PeerLaunch | None], ...]

    def __str__(self) -> str:
        said = [
            f"{ranks_text(ranks)}: {launch or 'no further launch'}"
            for ranks, launch in self.launches
        ]
        return (
            f"Graph {self.graph}, launch {self.index} of the group of {ranks_text(self.group)}: "
            + "; ".join(said)
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_group(launches: Sequence[PeerLaunch]) -> dict[tuple[int, ...], list[PeerLaunch]]:
    """The launches of each group, in order."""
    found: dict[tuple[int, ...], list[PeerLaunch]] = {}
    for launch in launches:
        found.setdefault(launch.ranks, []).append(launch)
    return found


def first_launch_that_differs(
    graph: str, group: tuple[int, ...], sequences: Mapping[int, Sequence[PeerLaunch]]
) -> Difference | None:
    """Return the first launch at which the members' sequences on one group part, or None. ``sequences``: by rank."""
    columns = itertools.zip_longest(*sequences.values())
    for index, column in enumerate(columns):
        said: dict[PeerLaunch | None, list[int]] = {}
        for rank, launch in zip(sequences, column, strict=True):
            said.setdefault(launch, []).append(rank)
        if len(said) > 1:
            items = sorted((tuple(ranks), launch) for launch, ranks in said.items())
            return Difference(graph, group, index, tuple(items))
    return None


def differences(graph: str, launches: Mapping[int, Sequence[PeerLaunch]]) -> list[Difference]:
    """One for each group whose members part in this graph. ``launches``: by rank, ranks traced only."""
    sequences = {rank: by_group(mine) for rank, mine in launches.items()}
    groups = dict.fromkeys(group for mine in sequences.values() for group in mine)
    found = []
    for group in sorted(groups):
        members = {rank: sequences[rank].get(group, []) for rank in sequences if rank in group}
        difference = first_launch_that_differs(graph, group, members)
        if difference is not None:
            found.append(difference)
    return found


def deadlock(launches: Mapping[int, Sequence[PeerLaunch]]) -> list[str]:
    """Launches that wait for each other in a circle, as text, or [] if there is an order for all."""
    sorter: graphlib.TopologicalSorter[tuple[tuple[int, ...], int]] = graphlib.TopologicalSorter()
    for mine in launches.values():
        counts: dict[tuple[int, ...], int] = {}
        last = None
        for launch in mine:
            index = counts[launch.ranks] = counts.get(launch.ranks, -1) + 1
            step = (launch.ranks, index)
            sorter.add(step, *([] if last is None else [last]))
            last = step
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [f"launch {index} of {ranks_text(group)}" for group, index in error.args[1]]
    return []
