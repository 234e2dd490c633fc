"""Compute again in the backward of a whole training step what its forward need not keep.

AOTAutograd traces such a step as one graph and parts nothing, so that each value that a backward
reads would be kept from where the forward has made it. Upstream's partitioner says here, too, what
is kept: as for a forward and a backward graph of their own, by checkpoints and FSDP2's gathers,
which are marked, and by the least bytes that cross from one to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from inductor_passes.graph.collectives import is_launch
from inductor_passes.graph.phases import last_phase, phase_of, set_phase
from inductor_passes.torch_compat.aot import values_kept_for_backward
from inductor_passes.torch_compat.nodes import (
    higher_order_name,
    is_impure,
    is_random,
    overload_packet,
)

# Of an output node's meta: every value that a backward reads is marked, to be kept or not.
_DECIDED = "inductor_passes_kept_is_decided"


def rematerialize(gm: fx.GraphModule) -> int:
    """Copy values that no backward finds kept to where it reads them; return how many.

    ``gm`` is functional but for writes at its end, and its phases are marked.
    """
    if gm.graph.output_node().meta.get(_DECIDED):
        return recompute_marked(gm.graph)
    crossed = (border for border in borders(gm.graph) if border.is_crossed)
    return sum(border.recompute(kept_by_partition(border)) for border in crossed)


def decide_kept(graph: fx.Graph, kept: Iterable[fx.Node], again: Iterable[fx.Node]) -> None:
    """Mark all that a backward reads of values computed before it: kept there, or computed again.

    Upstream's partition follows the marks too.
    """
    for node in kept:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in again:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    graph.output_node().meta[_DECIDED] = True


def recompute_marked(graph: fx.Graph) -> int:
    """Do what the marks of ``decide_kept`` say in a graph with marked phases; return how many
    nodes run again.
    """
    copies = 0
    for border in borders(graph):
        again = CheckpointPolicy.MUST_RECOMPUTE
        copies += border.recompute({n for n in border.forward if n.meta.get("recompute") != again})
    return copies


def borders(graph: fx.Graph) -> Iterator[Border]:
    """Yield the borders of a graph with marked phases, the first backward's first."""
    for phase in range(1, last_phase(graph) + 1):
        yield Border(graph, phase)


class Border:
    """Where one backward of a program begins: ``forward`` was computed since the backward before
    it, and ``backward`` is computed up to the next one.
    """

    def __init__(self, graph: fx.Graph, phase: int) -> None:
        self.graph, self.phase = graph, phase
        nodes = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
        self.forward = dict.fromkeys(node for node in nodes if phase_of([node]) == phase - 1)
        self.backward = dict.fromkeys(node for node in nodes if phase_of([node]) == phase)

    def derived_again(self, values: Iterable[fx.Node]) -> set[fx.Node]:
        """Return what runs again of what is made of some values."""
        found, again = set(values), CheckpointPolicy.MUST_RECOMPUTE
        for node in self.forward:
            if node.meta.get("recompute") == again and found & set(node.all_input_nodes):
                found.add(node)
        return found - set(values)

    @property
    def is_crossed(self) -> bool:
        """Return whether the backward reads what the forward has computed."""
        return any(user in self.backward for node in self.forward for user in node.users)

    def is_read_behind(self, node: fx.Node) -> bool:
        """Return whether a value is read behind the backward, and so lives through it anyway."""
        return any(user not in self.forward and user not in self.backward for user in node.users)

    def recompute(self, kept: Collection[fx.Node]) -> int:
        """Copy what is not kept to just before the first node of the backward that reads it."""
        given_up = {node for node in self.forward if node not in kept and may_repeat(node)}
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(self.backward):
            for source in _behind(node.all_input_nodes, given_up, copies):
                with self.graph.inserting_before(node):
                    copy = self.graph.node_copy(source, lambda each: copies.get(each, each))
                copy.meta = dict(source.meta)
                self.add_to_backward(copy)
                copies[source] = copy
            for source in node.all_input_nodes:
                if source in copies:
                    node.replace_input_with(source, copies[source])
        for source in reversed(self.forward):
            if source in copies and not source.users:
                self.graph.erase_node(source)
        return len(copies)

    def add_to_backward(self, node: fx.Node) -> None:
        """Mark a node that is put into the backward, to bring there what the forward has made."""
        # The second key is how AOTAutograd's partition knows it in a graph of one border.
        node.meta |= {"autograd_backward": True, "partitioner_tag": "must_be_in_backward"}
        set_phase(node, self.phase, again=True)
        self.backward[node] = None


def kept_by_partition(border: Border) -> frozenset[fx.Node]:
    """Return what upstream would keep of a graph of a border's two sides alone."""
    joint = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in (*border.forward, *border.backward):
        for source in node.all_input_nodes:
            if source not in twins:  # the partitioner knows inputs by this name
                twins[source] = joint.placeholder(f"primals_{len(twins)}")
                twins[source].meta = dict(source.meta)
        twin = twins[node] = joint.node_copy(node, twins.__getitem__)
        twin.meta["partitioner_tag"] = None
        if node in border.backward:
            twin.meta["partitioner_tag"] = "must_be_in_backward"
        elif not may_repeat(node):
            twin.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    # Nothing that takes long is left to the backward alone, even if the loss is not returned.
    heavy = [twins[node] for node in border.forward if _is_heavy(node)]
    needed = joint.call_function(_needed, tuple(heavy))
    needed.meta["val"] = ()
    outside = [twins[node] for node in border.forward if border.is_read_behind(node)]
    ends = [
        n for n in border.backward if not n.users or any(u not in border.backward for u in n.users)
    ]
    joint.output((needed, *outside, *(twins[node] for node in ends)))
    # Constants of the graph are attributes of its module.
    module = fx.GraphModule(border.graph.owning_module or {}, joint)
    names = values_kept_for_backward(module, 1 + len(outside))
    return frozenset(node for node in border.forward if twins[node].name in names)


def _behind(
    sources: Sequence[fx.Node], given_up: Collection[fx.Node], copies: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """What has to be computed again for ``sources``, inputs first."""
    pending = [(source, False) for source in reversed(sources)]
    seen: set[fx.Node] = set()
    while pending:
        node, has_inputs = pending.pop()
        if has_inputs:
            yield node
        elif node not in seen and node not in copies and node in given_up:
            seen.add(node)
            pending.append((node, True))
            pending += [(source, False) for source in reversed(node.all_input_nodes)]


def _needed(*values: object) -> None:
    """Stands in a graph that is never run."""


def _is_heavy(node: fx.Node) -> bool:
    has_flops = overload_packet(node.target) in flop_registry
    return is_launch(node) or has_flops or higher_order_name(node.target) is not None


def may_repeat(node: fx.Node) -> bool:
    """Whether a second run of ``node`` gives what the first gave, and does nothing else."""
    marked = node.meta.get("recompute")
    asked = marked in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    if is_random(node):
        return False
    return asked or not (is_launch(node) or is_impure(node))
