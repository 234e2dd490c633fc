"""Hosts that a job's ranks share, and the shapes of group that are worth measuring on them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from inductor_passes.errors import CalibrationError
from inductor_passes.machine.prices.group_shape import GroupShape


@dataclass(frozen=True, slots=True)
class Layout:
    """A job of ``ranks`` ranks on ``nodes`` hosts, as many on each, in order."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks of one host."""
        return self.ranks // self.nodes

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Layout:
        """The layout of ranks on the hosts named. Raises CalibrationError for one that no topology has."""
        names = list(dict.fromkeys(hosts))
        per_node = len(hosts) // len(names)
        if list(hosts) != [name for name in names for _ in range(per_node)]:
            counts = ", ".join(f"{hosts.count(name)} on {name}" for name in names)
            raise CalibrationError(
                f"The job's ranks are not laid out evenly and in order: {counts}.",
                "A topology has as many ranks on every node, numbered through.",
                "Start as many on each host, the ranks of one host after another, as torchrun does.",
            )
        return cls(len(hosts), len(names))

    def groups_of(self, rank: int) -> dict[GroupShape, list[int]]:
        """Shape and global ranks of each group that ``rank`` measures in; the same shapes on every rank.

        Within a host those of two ranks, four and so on, and all; across hosts one rank of each, and all.
        All ranks of the job come last.
        """
        found: dict[GroupShape, list[int]] = {}
        size = 2
        while size < self.per_node:
            if self.per_node % size == 0:
                found[GroupShape(size, 1)] = _block(rank, size)
            size *= 2
        if self.per_node > 1:
            found[GroupShape(self.per_node, 1)] = _block(rank, self.per_node)
        if self.nodes > 1:
            across = range(rank % self.per_node, self.ranks, self.per_node)
            found[GroupShape(self.nodes, self.nodes)] = list(across)
            found[GroupShape(self.ranks, self.nodes)] = list(range(self.ranks))
        return found


def _block(rank: int, size: int) -> list[int]:
    first = rank // size * size
    return list(range(first, first + size))


def layout_of_job(host: str = "") -> Layout:
    """Learn from all ranks which of them share a host. Every rank of the job calls it.

    ``host``: a name for this one, where hosts are not told apart by their host names. Raises
    CalibrationError where the layout is uneven.
    """
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, host or socket.gethostname())
    return Layout.of(names)
