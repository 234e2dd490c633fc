"""Extract a schedule problem from an FX graph and its costs.

Every node of the graph is a node of the problem. What only keeps order (``dependencies.py``) goes
through a *token*, a node of no time and no bytes that stands for "has run": a dependency on the
node itself would keep its value in memory.

A graph gathers parameters one by one. FSDP2 gathers those of a module at once, the next module's
ahead of time, and packs a module's gradients before it reduces them. A scheduler that may take no
more than the program's order could do neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from torch import fx
from torch.distributed.fsdp import FSDPModule

from inductor_passes.cost import CostModel
from inductor_passes.graph.aliasing import mutated_inputs
from inductor_passes.graph.collectives import (
    argument,
    dtype_name,
    group_name,
    group_size,
    input_tensors,
    is_coalesced,
    is_wait,
    kind,
    output_bytes,
    payload_bytes,
    reduce_op,
    role,
    tensor_bytes,
)
from inductor_passes.graph.dependencies import order_only
from inductor_passes.graph.phases import fill_phases, phase_of
from inductor_passes.schedule.solver.problem import MERGED_OPS, MIB, LinkTable, Node, Problem
from inductor_passes.simulate import Timeline
from inductor_passes.simulate.timeline import memory_owners, value_bytes


@dataclass
class _Module:
    """What one sharded module gathers and reduces in a graph: of each launch its position, its
    bytes and when they were last needed.
    """

    gathers: list[tuple[int, int, int]] = field(default_factory=list)
    reductions: list[tuple[int, int]] = field(default_factory=list)


def runtime_bytes(graph: fx.Graph, timeline: Callable[[], Timeline]) -> int | None:
    """Bytes (local) by which FSDP2's peak is above that of the program's order; None if the graph
    gathers for none of its modules.

    ``timeline`` simulates the graph; it is called where there is such a module.
    """
    modules = _modules(graph)
    if not any(module.gathers for module in modules):
        return None
    change = [0] * (len(graph.nodes) + 1)

    def hold(size: int, first: int, last: int) -> None:
        change[first] += size
        change[min(last + 1, len(change) - 1)] -= size

    gathering = sorted((m for m in modules if m.gathers), key=lambda m: m.gathers[0])
    # FSDP2 gathers the next module while this one computes: from the first gather of the module
    # before it, its parameters are alive whole.
    ahead = 0
    for module in gathering:
        whole = sum(size for _, size, _ in module.gathers)
        hold(whole, ahead, max(last for *_, last in module.gathers))
        ahead = module.gathers[0][0]
        # The program's own peak has these bytes already, one gather at a time.
        for position, size, last in module.gathers:  # as the graph has them
            hold(-size, position, last)
    reducing = sorted((m for m in modules if m.reductions), key=lambda m: m.reductions[-1])
    for module, after in zip_longest(reducing, reducing[1:]):
        last = module.reductions[-1][0]
        for position, size in module.reductions:
            hold(size, position + 1, last)
        # FSDP2 copies a module's gradients into one buffer and keeps that until the next module's
        # reduction has started.
        packed = sum(size for _, size in module.reductions)
        hold(packed, last, len(graph.nodes) if after is None else after.reductions[-1][0])
    live = timeline().live_bytes
    peak = max(before + more for before, more in zip(live, accumulate(change), strict=False))
    # Only the difference of two peaks counts: the absolute peak leaves out what lies outside the
    # graph.
    return max(0, peak - max(live))


def _modules(graph: fx.Graph) -> list[_Module]:
    """The modules sharded by ``fully_shard`` that launches were traced in, the innermost counts.

    Where a graph holds forward and backward, a module is another one in each.
    """
    nodes = list(graph.nodes)
    owners = memory_owners(graph)
    position = {node: i for i, node in enumerate(nodes)}
    last = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            owner = owners[position[used]]
            last[owner] = max(last[owner], i)
    fill_phases(graph)
    found: dict[tuple[str, int | None], _Module] = defaultdict(_Module)
    for i, node in enumerate(nodes):
        does = kind(node)
        if does not in ("all_gather", "reduce_scatter") or (path := _sharded_module(node)) is None:
            continue
        module = found[path, phase_of([node])]
        if does == "all_gather":
            module.gathers.append((i, output_bytes(node), last[owners[i]]))
        else:
            module.reductions.append((i, sum(map(tensor_bytes, input_tensors(node)))))
    return list(found.values())


def _sharded_module(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    # The stack runs from the outermost module inwards. Nested ``fully_shard`` puts a parameter in
    # the group of the innermost module that was sharded.
    for path, type_ in reversed(stack.values()):
        if isinstance(type_, type) and issubclass(type_, FSDPModule):
            return str(path)
    return None


# Points of a link table: the payloads that occur, and doubling ones beyond any bucket of the graph.
SMALLEST_PAYLOAD = 1024
MOST_EXACT_POINTS = 256


@dataclass(frozen=True, slots=True)
class Extracted:
    """A problem, and the graph's node that each of its nodes stands for; None for a token."""

    problem: Problem
    nodes: tuple[fx.Node | None, ...]

    def order(self, ids: Sequence[int]) -> list[fx.Node]:
        """The graph's nodes in the order of a schedule."""
        return [node for node in (self.nodes[i] for i in ids) if node is not None]


def extract(
    graph: fx.Graph,
    cost: CostModel,
    *,
    ranks_differ: bool = False,
    merge: Collection[str] = MERGED_OPS,
) -> Extracted:
    """Reduce a post-grad graph to numbers. Linear in nodes and edges; the graph is not changed.

    ``ranks_differ``: launches keep their order. ``merge``: kinds of launches that may share a
    bucket. Sizes are local, symbolic ones by their hint; times are the cost model's.
    """
    nodes = list(graph.nodes)
    owners = memory_owners(graph)
    behind = order_only(graph, owners, keep_launches=ranks_differ)
    place = {node: i for i, node in enumerate(nodes)}
    # A token only where something must come behind a node for order alone: every node would double
    # the problem.
    has_token = set().union(*behind)
    ids: list[int] = []
    for i in range(len(nodes)):
        ids.append(ids[-1] + 1 + (i - 1 in has_token) if ids else 0)
    found: list[Node] = []
    stands_for: list[fx.Node | None] = []
    launch_into: dict[int, int] = {}
    landed: dict[int, int] = {}  # memory -> the wait that a launch into it ended at
    for i, node in enumerate(nodes):
        deps = {ids[place[source]] for source in node.all_input_nodes}
        deps |= {ids[j] + 1 for j in behind[i]}
        does = role(node)
        special: dict[str, Any] = {"kind": "compute"}
        if does == "launch":
            # By memory and not by argument: a wait may take a view of a launch's result, or one
            # part of a coalesced one.
            launch_into[owners[i]] = i
            # A launch in place into memory that was waited for before begins anew.
            landed.pop(owners[i], None)
            special = _of_launch(node, merge)
        elif does == "wait":
            special = {"kind": "wait"}
            launch = launch_into.pop(owners[i], None)
            if owners[i] in landed:  # another result of a launch that has been waited for
                deps.add(landed[owners[i]])
            landed.setdefault(owners[i], ids[i])
            if launch is not None:
                special["launch"] = ids[launch]
                # A launch reads its input until it is done.
                deps |= {ids[place[source]] for source in nodes[launch].all_input_nodes}
        elif node.op == "output":
            special = {"kind": "output"}
        elif node.op in ("placeholder", "get_attr"):
            special = {"kind": "input"}
        elif does == "blocking":
            # It holds the compute stream and its group's channel, so its link time counts as
            # compute.
            special.update(us=cost.launch_us(node), group=group_name(node))
        else:
            special["us"] = cost.compute_us(node)
        fresh = owners[i] == i
        found.append(
            Node(
                name=node.name,
                deps=tuple(sorted(deps)),
                bytes=value_bytes(node) if fresh else 0,
                alias=None if fresh else ids[owners[i]],
                **special,
            )
        )
        stands_for.append(node)
        # Right behind its node: ids count on this place.
        if i in has_token:
            found.append(Node(name=f"after {node.name}", kind="compute", deps=(ids[i],)))
            stands_for.append(None)
    launches = [node for node in nodes if role(node) == "launch"]
    return Extracted(
        Problem(
            name="graph",
            nodes=tuple(found),
            links=_links(launches, [found[ids[place[node]]] for node in launches], cost),
            copy_bytes_per_us=cost.copy_bytes_per_us,
            group_size={group_name(launch): max(1, group_size(launch)) for launch in launches},
            compute_stretch=cost.compute_stretch,
        ),
        tuple(stands_for),
    )


def _of_launch(launch: fx.Node, merge: Collection[str]) -> dict[str, Any]:
    name = kind(launch)
    return {
        "kind": "launch",
        "group": group_name(launch),
        # An operation of its own has no partner to merge with.
        "op": name if name in merge and can_merge(launch) else f"{name}, {launch.name}",
        "dtype": dtype_name(launch),
        "reduce": reduce_op(launch),
        "payload": payload_bytes(launch),
    }


def can_merge(launch: fx.Node) -> bool:
    """Return whether a launch may share a bucket: one dense tensor in, one wait, equal shares
    for all ranks.
    """
    return (
        kind(launch) in MERGED_OPS
        and not is_coalesced(launch)
        and not mutated_inputs(launch)
        # A bucket puts one wait in the place of each member's only one.
        and len(launch.users) == 1
        and all(is_wait(user) for user in launch.users)
        # A symbolic size may differ between ranks: its hint would decide the bucket here and
        # another one there.
        and all(isinstance(size, int) for t in input_tensors(launch) for size in t.shape)
        # A group that is an input of the graph has no ranks that could be compared.
        and not isinstance(argument(launch, "group_name"), fx.Node)
        and _splits_evenly(launch)
    )


def _splits_evenly(launch: fx.Node) -> bool:
    """Return whether an all_to_all gives every rank the same share of its rows; true for other
    collectives.
    """
    for name in ("input_split_sizes", "output_split_sizes"):
        sizes = argument(launch, name)
        if isinstance(sizes, (list, tuple)) and (
            len(set(sizes)) > 1 or not all(isinstance(size, int) for size in sizes)
        ):
            return False
    return True


def _links(
    launches: Sequence[fx.Node], numbers: Sequence[Node], cost: CostModel
) -> dict[str, dict[str, LinkTable]]:
    """Tables of every group and operation, exact at the payloads that occur."""
    examples: dict[tuple[str, str], fx.Node] = {}
    payloads: dict[tuple[str, str], set[int]] = {}
    tables: dict[str, dict[str, LinkTable]] = {}
    for launch, node in zip(launches, numbers, strict=True):
        if node.op in MERGED_OPS:
            examples.setdefault((node.group, node.op), launch)
            payloads.setdefault((node.group, node.op), set()).add(node.payload)
        else:
            us = cost.launch_us(launch)
            # Two equal points: this launch merges with nothing, so its price does not depend on the
            # payload.
            tables.setdefault(node.group, {})[node.op] = ((1.0, us), (2.0, us))
    doubling, most = [SMALLEST_PAYLOAD], sum(node.payload for node in numbers)
    while doubling[-1] < 2 * most:
        doubling.append(2 * doubling[-1])
    for (group, op), launch in examples.items():
        # Linear in between, a table would misprice payloads around the switch of an algorithm; the
        # payloads of the graph are therefore exact, the sums of buckets are not.
        exact = sorted(payloads[group, op] - {0})[:MOST_EXACT_POINTS]
        points = sorted({*exact, *doubling, 2 * doubling[-1]})
        tables.setdefault(group, {})[op] = tuple(
            (size / MIB, cost.link_us(launch, [size])) for size in points
        )
    return tables
