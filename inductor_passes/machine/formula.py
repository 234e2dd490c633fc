"""The time of a step as a formula: in the number of ranks, and in the sizes that were traced as symbols.

What holds as ranks are added is weak scaling: each rank keeps its work, what a gather brings together
stays as large, and so does what the other collectives take in. So a formula predicts from one trace what a trace on
thousands of ranks would say of data parallelism. Computing on shards, little beside the layers, keeps the
time it had. Kernels are those of the traced sizes. The formulas of the topology count, not its measured tables,
which are points.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
from torch import fx

from inductor_passes.errors import OptionError
from inductor_passes.graph.collectives import (
    argument,
    blocking_kind,
    group_size,
    is_launch,
    kind,
    payloads,
)
from inductor_passes.graph.kinds import loop_of
from inductor_passes.machine.prices.amount import (
    Amount,
    Sizes,
    expr_of,
    size_symbol,
    symbolic_sizes,
)
from inductor_passes.machine.prices.flops import op_name
from inductor_passes.machine.prices.group_shape import GroupShape, shape_of
from inductor_passes.machine.prices.launches import has_one_peer
from inductor_passes.machine.prices.machine import Machine
from inductor_passes.machine.prices.roofline import TopologyCostModel
from inductor_passes.machine.topology.topology import Topology
from inductor_passes.torch_compat.c10d import group_ranks

RANKS = size_symbol("n")
COMPUTE = "compute"
_GATHERS = ("all_gather", "gather")  # their payload is a share of what they bring together


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """One call of a collective: kind, global ranks of its group and how it lies on nodes, payloads in bytes."""

    kind: str
    ranks: tuple[int, ...]
    shape: GroupShape
    payloads: tuple[float, ...]
    one_peer: bool


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Parts of a formula, read from one graph: microseconds of its kernels by kind, its collectives."""

    kernels: tuple[tuple[str, sympy.Expr], ...]
    calls: tuple[LaunchCall, ...]
    sizes: Sizes

    @classmethod
    def of(cls, graph: fx.Graph, topology: Topology) -> GraphCosts:
        """Read a post-grad graph, while its process groups exist. Shapes are local."""
        model = TopologyCostModel(_formulas_only(topology))
        kernels, calls = [], []
        with symbolic_sizes() as sizes:
            for node in graph.nodes:
                if name := kind(node) if is_launch(node) else blocking_kind(node):
                    calls.append(_call(node, name, topology))
                elif us := model.compute_us(node):
                    kernels.append((_kernel(node), expr_of(us)))
        return cls(tuple(kernels), tuple(calls), sizes)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the step: ``count`` kernels or collectives of a kind that take ``us`` microseconds together."""

    where: str
    what: str
    count: int
    us: sympy.Expr


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step at given sizes, on the compute stream and on the link of each group."""

    compute_us: float
    link_us: Mapping[str, float]

    @property
    def at_least_us(self) -> float:
        """With all hidden that can be and no launch merged: the longest of the channels."""
        return max(self.compute_us, *self.link_us.values(), 0.0)

    @property
    def at_most_us(self) -> float:
        """With nothing hidden."""
        return self.compute_us + sum(self.link_us.values())


@dataclass(frozen=True, slots=True)
class StepFormula:
    """Formulas of all parts of a step. ``traced`` and ``sources`` have an entry for each symbol's name."""

    terms: tuple[Term, ...]
    traced: Mapping[str, int]
    sources: Mapping[str, str]

    @classmethod
    def of(
        cls,
        graphs: Sequence[GraphCosts],
        topology: Topology,
        growing: Sequence[Sequence[int]] = (),
    ) -> StepFormula:
        """Sum up the graphs of one step.

        ``growing``: the global ranks of the groups that get more ranks. The first has ``n``, the others as
        many for each of these as they had. By default the largest group, and of those the most spread.
        Raises OptionError for a group that is not there, or not evenly spaced.
        """
        groups = {call.ranks for graph in graphs for call in graph.calls}
        scaled = _scaled(groups, growing)
        ranks = {group: RANKS * len(group) / len(scaled[0]) for group in scaled}
        found: dict[tuple[str, str], list[sympy.Expr]] = {}
        for what, us in (kernel for graph in graphs for kernel in graph.kernels):
            found.setdefault((COMPUTE, what), []).append(us)
        calls = [call for graph in graphs for call in graph.calls]
        machine = Machine(_formulas_only(topology))
        for call, count in Counter(calls).items():  # layers repeat them
            us = _call_us(call, machine, ranks.get(call.ranks))
            found.setdefault((_label(call.ranks), call.kind), []).extend([us] * count)
        terms = [Term(*key, len(all_), sympy.Add(*all_)) for key, all_ in found.items()]
        traced, sources = {}, {}
        if scaled:
            traced[RANKS.name] = len(scaled[0])
            sources[RANKS.name] = f"ranks of the group {_label(scaled[0])}"
        for graph in graphs:
            traced.update((symbol.name, hint) for symbol, hint in graph.sizes.hints.items())
            sources.update((symbol.name, source) for symbol, source in graph.sizes.sources.items())
        used = {symbol.name for term in terms for symbol in term.us.free_symbols}
        return cls(
            tuple(sorted(terms, key=lambda term: (term.where != COMPUTE, term.where, term.what))),
            {name: hint for name, hint in traced.items() if name in used},
            {name: source for name, source in sources.items() if name in used},
        )

    def at(self, **values: int) -> StepTimes:
        """Evaluate at some sizes; what is not given is as traced. Raises OptionError for an unknown symbol."""
        for name in values.keys() - self.traced.keys():
            raise OptionError(
                f"The formula has no symbol {name!r}.",
                "",
                f"Its symbols are {', '.join(self.traced) or 'none: every size was static'}.",
            )
        point = {size_symbol(name): value for name, value in {**self.traced, **values}.items()}
        us: dict[str, float] = {COMPUTE: 0.0}
        for term in self.terms:
            us[term.where] = us.get(term.where, 0.0) + float(term.us.xreplace(point))
        return StepTimes(us.pop(COMPUTE), us)


def _formulas_only(topology: Topology) -> Topology:
    return dataclasses.replace(topology, collectives=(), products=())


def _kernel(node: fx.Node) -> str:
    loop = loop_of(node.target)
    return op_name(node) if loop == "none" else "pointwise and reductions"


def _call(node: fx.Node, name: str, topology: Topology) -> LaunchCall:
    group = argument(node, "group_name")
    ranks = group_ranks(group.meta.get("val") if isinstance(group, fx.Node) else group)
    return LaunchCall(
        name,
        tuple(ranks or range(group_size(node))),
        shape_of(node, topology.ranks_per_node),
        tuple(payloads(node)),
        has_one_peer(node),
    )


def _call_us(call: LaunchCall, machine: Machine, ranks: sympy.Expr | None) -> sympy.Expr:
    """Microseconds of one call; of one on a group of ``ranks``, in a node and across nodes."""
    if ranks is None:
        us = machine.call_us(call.kind, call.payloads, call.shape, one_peer=call.one_peer)
        return expr_of(us)
    traced, stride = len(call.ranks), call.ranks[1] - call.ranks[0]
    sent = call.payloads
    if call.kind in _GATHERS:
        whole = [payload * traced for payload in sent]
        sent = tuple(Amount(w / traced, expr_of(w) / ranks) for w in whole)
    in_node = max(
        machine.topology.ranks_per_node // stride, 1
    )  # ranks of this group that share a node

    def us_on(size: int, nodes: float) -> sympy.Expr:
        shape = GroupShape(cast(Any, Amount(size, ranks)), cast(Any, nodes))
        return expr_of(machine.call_us(call.kind, sent, shape, one_peer=call.one_peer))

    across = us_on(2 * in_node, Amount(2, ranks / in_node))
    if in_node == 1:
        return across
    return sympy.Piecewise((us_on(in_node, 1), ranks <= in_node), (across, True))


def _scaled(
    groups: Iterable[tuple[int, ...]], asked: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    even = [g for g in groups if len(g) > 1 and g == tuple(range(g[0], g[-1] + 1, g[1] - g[0]))]
    if not asked:
        return sorted(even, key=lambda g: (len(g), g[-1] - g[0]))[-1:]
    for group in map(tuple, asked):
        if group not in even:
            raise OptionError(
                f"No collective runs on an evenly spaced group of the ranks {_label(group)}.",
                "Only the size of such a group can be a symbol.",
                f"Groups are {'; '.join(map(_label, sorted(even))) or 'none'}.",
            )
    return list(map(tuple, asked))


def _label(ranks: tuple[int, ...]) -> str:
    """``0, 2, ..., 14``"""
    shown = ranks if len(ranks) <= 4 else (*ranks[:2], "...", ranks[-1])
    return ", ".join(map(str, shown))
