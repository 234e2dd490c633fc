"""Find the order that a graph must keep although no value flows.

The causes are memory, effects, random numbers and ranks.

- A node that writes memory comes after all earlier uses of it, and before all later uses. A launch
  uses what it reads until its wait, because the link may read it as late as that.
- A *barrier* is a collective of that name, or an operator whose effects nobody declares. It stays
  where it is, and no node passes it.
- Random operators keep their order. Otherwise each would draw another's numbers.
- Where ranks may hold different graphs, launches keep the program's order, because ranks share
  nothing else.
- Where launches show that ranks differ, such as a send or a receive, no launch moves below a wait
  that it preceded. The peer of that wait may itself wait for the launch.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping, Sequence
from graphlib import TopologicalSorter

import torch
from torch import fx

from inductor_passes.graph.aliasing import mutated_inputs
from inductor_passes.graph.collectives import argument, kind, launch_of, role
from inductor_passes.torch_compat.nodes import is_impure, is_random

BARRIERS = frozenset(("barrier", "monitored_barrier"))
# One rank's send is another's receive, one rank's input larger than another's.
_UNEQUAL_KINDS = frozenset(("send", "recv", "isend", "irecv", "batch_p2p", "scatter", "gather"))
_CHECKS = ("_assert", "sym_constrain")
_EFFECTFUL = frozenset(("with_effects", "call_torchbind"))


def barriers(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that cannot move and that nothing may pass."""
    return [node for node in graph.nodes if is_barrier(node)]


def is_barrier(node: fx.Node) -> bool:
    """Return whether a node has effects that its schema does not declare."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op != "call_function":
        return True
    if role(node) == "launch":
        return kind(node) in BARRIERS
    if role(node) or node.target is operator.getitem or is_random(node):
        return False
    # A higher-order operator says nothing about memory in a schema. It stays where it is if torch
    # calls it impure, or if a subgraph of it communicates: passing that would reorder collectives.
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target.name() in _EFFECTFUL or is_impure(node) or _communicates(node)
    if isinstance(node.target, torch._ops.OpOverload):
        if mutated_inputs(node) or node.target._opname.startswith(_CHECKS):
            return False  # what is written is known, and a check may run at any time
        # An operator without results is called for an effect, whatever its schema says.
        return is_impure(node) or not node.target._schema.returns
    return is_impure(node)


def shows_that_ranks_differ(graph: fx.Graph) -> bool:
    """Return whether the graph itself says that other ranks may decide differently by what sizes
    they see.

    Symbolic sizes count: their hints are what this rank happened to see.
    """
    return _has_symbols(graph) or launches_show_that_ranks_differ(graph)


def _has_symbols(graph: fx.Graph) -> bool:
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        # Inputs are enough: a symbol that is made inside a graph depends on data, and is looked at
        # where it sizes an exchange.
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return True
    return False


def differs_by_numbers(graph: fx.Graph) -> bool:
    """Return whether the graph holds numbers that other ranks may see otherwise: hints of symbols,
    or sizes of an exchange.

    Sizes of an exchange that are symbols without a hint, as those that tokens give, are the same
    graph on all ranks.
    """
    return _has_symbols(graph) or launches_show_that_ranks_differ(graph, numbers=True)


def launches_show_that_ranks_differ(graph: fx.Graph, numbers: bool = False) -> bool:
    """Return whether a launch is of a kind that is another one on another rank, or splits
    unevenly; ``numbers``: by numbers, and not by symbols.
    """
    return any(
        role(node) == "launch" and (kind(node) in _UNEQUAL_KINDS or _splits_unevenly(node, numbers))
        for node in graph.nodes
    )


def order_only(graph: fx.Graph, owners: Sequence[int], *, keep_launches: bool) -> list[set[int]]:
    """Return the positions that each node must follow besides its inputs, by position.

    ``owners`` comes from ``memory_owners``. With ``keep_launches``, launches keep their order.
    """
    nodes = list(graph.nodes)
    memory = _Memory(nodes, owners)
    # A send is a receive elsewhere, so the order of launches alone does not keep ranks in step:
    # waits count too.
    pairs = keep_launches and launches_show_that_ranks_differ(graph)
    found: list[set[int]] = []
    barrier: int | None = None
    open_ends: dict[int, None] = {}  # since the barrier: nodes that no other of them uses
    last: dict[str, int] = {}  # what is a chain: the last link of it
    position = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        deps = memory.of(i)
        if node.op != "placeholder":
            for source in node.all_input_nodes:
                open_ends.pop(position[source], None)
            if barrier is not None:
                deps.add(barrier)
            if node.op == "output" or is_barrier(node):
                # Every other node before is an input, direct or not, of these or of the last
                # barrier. With an edge from every node, edges would be quadratic.
                deps.update(open_ends)
                barrier, open_ends = i, {}
            else:
                open_ends[i] = None
        chains = ["random"] if is_random(node) else []
        if keep_launches and role(node) in ("launch", "blocking"):
            chains.append("launch")
        elif pairs and role(node) == "wait" and "launch" in last:
            # The peer may wait for that launch first: below this wait, both ranks could hang.
            deps.add(last["launch"])
        for chain in chains:
            deps.update([last[chain]] if chain in last else [])
            last[chain] = i
        # What is an input anyway needs no token.
        found.append(deps - {position[source] for source in node.all_input_nodes})
    return found


class _Memory:
    """Accesses to memory that somebody writes, in program order."""

    def __init__(self, nodes: Sequence[fx.Node], owners: Sequence[int]) -> None:
        self._nodes, self._owners = nodes, owners
        self._position = {node: i for i, node in enumerate(nodes)}
        # Memory that nobody writes, which is nearly all of a functional graph, needs no
        # bookkeeping.
        self._written = {owner for node in nodes for owner in self._writes(node)}
        self._writer: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}

    def of(self, i: int) -> set[int]:
        """Earlier accesses that node i must come after; called once for each node, in order."""
        node, deps = self._nodes[i], set[int]()
        writes, used = self._writes(node), node.all_input_nodes
        if role(node) == "wait":
            writes.add(self._owners[i])  # until then, a launch that works in place still writes
            launch = launch_of(node)
            # A wait reads the launch's inputs too: no write may reach them before it.
            used = [*used, *(launch.all_input_nodes if launch is not None else ())]
        reads = {self._owners[self._position[source]] for source in used}
        # Sorted, so that the set of dependencies is built in one order on every rank.
        for owner in sorted((reads | writes) & self._written):
            deps.update([self._writer[owner]] if owner in self._writer else [])
            if owner in writes:
                # Anti-dependence: earlier readers must see the memory before this write.
                deps |= self._readers.pop(owner, set())
                self._writer[owner] = i
            else:
                self._readers.setdefault(owner, set()).add(i)
        return deps

    def _writes(self, node: fx.Node) -> set[int]:
        return {self._owners[self._position[target]] for target in mutated_inputs(node)}


def _splits_unevenly(launch: fx.Node, numbers: bool) -> bool:
    """Return whether split sizes differ; ``numbers`` ignores lists that hold symbols."""
    for name in ("input_split_sizes", "output_split_sizes"):
        sizes = argument(launch, name)
        if isinstance(sizes, (list, tuple)) and len(set(sizes)) > 1:
            if numbers and not all(isinstance(s, int) for s in sizes):
                continue
            # One peer gets all: a permutation, in which every rank sends and gets as much.
            if not all(isinstance(s, int) for s in sizes) or sum(s != 0 for s in sizes) != 1:
                return True
    return False


def _communicates(node: fx.Node) -> bool:
    """Return whether a subgraph that the node calls holds a collective."""
    module = node.graph.owning_module
    for source in node.all_input_nodes:
        inner = getattr(module, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            if any(role(n) or _communicates(n) for n in inner.graph.nodes):
                return True
    return False


def sorted_behind(behind: Mapping[int, Collection[int]]) -> list[int]:
    """Return the keys, each behind those that it names, and otherwise the smallest first.

    Raises CycleError.
    """
    sorter = TopologicalSorter(behind)
    sorter.prepare()
    order: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def relink(graph: fx.Graph, order: Sequence[fx.Node]) -> bool:
    """Make ``order``, a permutation of the nodes, the graph's order. Returns whether it changed."""
    # A graph that is in this order already counts as unchanged.
    if all(a is b for a, b in zip(graph.nodes, order, strict=True)):
        return False
    last = order[0]
    for node in order[1:]:
        # ``append`` moves a node in FX's linked list; those that stand right already cost a
        # comparison.
        if last.next is not node:
            last.append(node)
        last = node
    return True
