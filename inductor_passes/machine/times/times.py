"""Measured times of one program's graphs, as plain data: the same on every rank that uses them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inductor_passes.machine.topology.measured import Product


@dataclass(frozen=True, slots=True)
class NodeTime:
    """A node that computes. ``predicted_us``: by the topology alone.

    ``product``: batch, m, k and n of a matrix product of ``dtype``; empty for others.
    """

    operator: str
    us: float
    predicted_us: float
    dtype: str = ""
    product: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """A launch: from the moment at which the last rank came to it until the slowest had its result.

    ``ranks`` of the group on ``nodes`` nodes. ``payload_bytes``: of this rank's input. ``predicted_us``: by the
    topology alone. ``stretch``: how many times as long as by itself one of this kind took in the steps as they ran, beside compute and
    behind others of its kind.
    """

    kind: str
    ranks: int
    nodes: int
    payload_bytes: int
    us: float
    predicted_us: float
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """Times of one graph, by the names of its nodes before the passes; of launches, by those behind them.

    ``waited_us``: time that the compute stream stood still, of the schedule that was measured.
    """

    phase: str
    nodes: Mapping[str, NodeTime]
    launches: dict[str, LaunchTime]
    waited_us: float = 0.0

    def node_us(self, name: str, operator: str) -> float | None:
        """Time of a node; None for one that was not measured."""
        found = self.nodes.get(name)
        return found.us if found is not None and found.operator == operator else None

    def fits(self, operators: Mapping[str, str]) -> bool:
        """Return whether all rows are of a graph with these operators, by name."""
        return all(operators.get(name) == node.operator for name, node in self.nodes.items())


@dataclass(frozen=True, slots=True)
class TunedStep:
    """What a table was good for, in the job that measured it: of a step, the median of the slowest rank.

    ``changes``: what is otherwise in the schedules of the rank that wrote it, a line for each graph.
    """

    before_us: float
    after_us: float
    recompile_s: float
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Medians of one job's steps. Two tables of equal digest price everything alike.

    ``machine``: name of the topology, digest of its figures, and device. ``world``: ranks of the job. ``steps``: how
    many were timed. ``graphs``: by ``graph/identity.py``'s digest. ``probes``: launches of graphs at
    other places in the program, and those made to time another payload, whose ``predicted_us`` is 0. ``compute_stretch``: how many times as long a kernel took while a collective was on its way,
    ``launch_stretch``: a collective while kernels ran. ``inter_stretch``: both, of collectives between nodes, where the job has
    others too; None: the same.
    """

    machine: str
    torch: str
    world: int
    steps: int
    graphs: Mapping[str, GraphTimes]
    probes: tuple[LaunchTime, ...] = ()
    compute_stretch: float = 1.0
    launch_stretch: float = 1.0
    inter_stretch: tuple[float, float] | None = None
    digest: str = field(init=False, compare=False, default="")

    def __post_init__(self) -> None:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    def launch_stretch_on(self, nodes: int) -> float:
        """Of a collective of a group on so many nodes."""
        own = self.inter_stretch if nodes > 1 else None
        return self.launch_stretch if own is None else own[1]

    def computed(self) -> Iterator[NodeTime]:
        """All nodes that compute."""
        for graph in self.graphs.values():
            yield from graph.nodes.values()

    def launched(self) -> Iterator[LaunchTime]:
        """All launches, and probes."""
        for graph in self.graphs.values():
            yield from graph.launches.values()
        yield from self.probes

    def products(self) -> dict[tuple[str, Product], float]:
        """Times of matrix products by dtype and shape, the median where one ran more than once."""
        found: dict[tuple[str, Product], list[float]] = {}
        for node in self.computed():
            if len(node.product) == 4:
                batch, m, k, n = node.product
                found.setdefault((node.dtype, (batch, m, k, n)), []).append(node.us)
        return {key: statistics.median(us) for key, us in found.items()}
