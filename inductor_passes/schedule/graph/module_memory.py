"""Memory that FSDP2's own runtime would take for a graph of its modules: what a schedule of that graph may take too.

A graph gathers parameters one by one. FSDP2 gathers those of a module at once, the next module's ahead of time, and
packs a module's gradients before it reduces them. A scheduler that may take no more than the program's order
could do neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from torch import fx
from torch.distributed.fsdp import FSDPModule

from inductor_passes.graph.collectives import input_tensors, kind, output_bytes, tensor_bytes
from inductor_passes.simulate import Timeline
from inductor_passes.simulate.timeline import memory_owners


@dataclass
class _Module:
    """What one sharded module gathers and reduces in a graph: of each launch its position, its bytes and when they were last needed."""

    gathers: list[tuple[int, int, int]] = field(default_factory=list)
    reductions: list[tuple[int, int]] = field(default_factory=list)


def runtime_bytes(graph: fx.Graph, timeline: Callable[[], Timeline]) -> int | None:
    """Bytes (local) by which FSDP2's peak is above that of the program's order; None if the graph gathers for none of its modules.

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
    ahead = 0
    for module in gathering:
        whole = sum(size for _, size, _ in module.gathers)
        hold(whole, ahead, max(last for *_, last in module.gathers))
        ahead = module.gathers[0][0]
        for position, size, last in module.gathers:  # as the graph has them
            hold(-size, position, last)
    reducing = sorted((m for m in modules if m.reductions), key=lambda m: m.reductions[-1])
    for module, after in zip_longest(reducing, reducing[1:]):
        last = module.reductions[-1][0]
        for position, size in module.reductions:
            hold(size, position + 1, last)
        packed = sum(size for _, size in module.reductions)
        hold(packed, last, len(graph.nodes) if after is None else after.reductions[-1][0])
    live = timeline().live_bytes
    peak = max(before + more for before, more in zip(live, accumulate(change), strict=False))
    return max(0, peak - max(live))


def _modules(graph: fx.Graph) -> list[_Module]:
    """The modules sharded by ``fully_shard`` that launches were traced in, the innermost counts."""
    nodes = list(graph.nodes)
    owners = memory_owners(graph)
    position = {node: i for i, node in enumerate(nodes)}
    last = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        for used in node.all_input_nodes:
            owner = owners[position[used]]
            last[owner] = max(last[owner], i)
    found: dict[str, _Module] = defaultdict(_Module)
    for i, node in enumerate(nodes):
        does = kind(node)
        if does not in ("all_gather", "reduce_scatter") or (path := _sharded_module(node)) is None:
            continue
        if does == "all_gather":
            found[path].gathers.append((i, output_bytes(node), last[owners[i]]))
        else:
            found[path].reductions.append((i, sum(map(tensor_bytes, input_tensors(node)))))
    return list(found.values())


def _sharded_module(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    for path, type_ in reversed(stack.values()):
        if isinstance(type_, type) and issubclass(type_, FSDPModule):
            return str(path)
    return None
