"""Compute again in the backward of a whole training step what its forward need not keep.

AOTAutograd traces such a step as one graph and parts nothing, so that each value that a backward
reads would be kept from where the forward has made it. Upstream's partitioner says here, too, what
is kept: as for a forward and a backward graph of their own, by checkpoints and FSDP2's gathers,
which are marked, and by the least bytes that cross from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from inductor_passes.graph.collectives import is_launch
from inductor_passes.graph.phases import last_phase, phase_of, set_phase
from inductor_passes.torch_compat.aot import values_kept_for_backward
from inductor_passes.torch_compat.nodes import higher_order_name, is_random, overload_packet


def rematerialize(gm: fx.GraphModule) -> int:
    """Copy values that no backward finds kept to where it reads them; return how many.

    ``gm`` is functional but for writes at its end, and its phases are marked.
    """
    copies = 0
    for phase in range(1, last_phase(gm.graph) + 1):
        copies += _Border(gm, phase).recompute()
    return copies


class _Border:
    """Where one backward of a program begins: what was computed since the one before, and what
    is computed up to the next one.
    """

    def __init__(self, gm: fx.GraphModule, phase: int) -> None:
        self.graph, self.phase = gm.graph, phase
        nodes = [node for node in gm.graph.nodes if node.op in ("call_function", "get_attr")]
        self.forward = dict.fromkeys(node for node in nodes if phase_of([node]) == phase - 1)
        self.backward = dict.fromkeys(node for node in nodes if phase_of([node]) == phase)
        crossing = any(user in self.backward for node in self.forward for user in node.users)
        self.kept = self._kept(gm) if crossing else frozenset(self.forward)

    def _kept(self, gm: fx.GraphModule) -> frozenset[fx.Node]:
        """What upstream would keep of a graph of the two alone."""
        joint = fx.Graph()
        twins: dict[fx.Node, fx.Node] = {}
        for node in (*self.forward, *self.backward):
            for source in node.all_input_nodes:
                if source not in twins:  # the partitioner knows inputs by this name
                    twins[source] = joint.placeholder(f"primals_{len(twins)}")
                    twins[source].meta = dict(source.meta)
            twin = twins[node] = joint.node_copy(node, twins.__getitem__)
            twin.meta["partitioner_tag"] = None
            if node in self.backward:
                twin.meta["partitioner_tag"] = "must_be_in_backward"
            elif not _may_repeat(node):
                twin.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # Nothing that takes long is left to the backward alone, even if the loss is not returned.
        heavy = [twins[node] for node in self.forward if _is_heavy(node)]
        needed = joint.call_function(_needed, tuple(heavy))
        needed.meta["val"] = ()
        outside = [twins[node] for node in self.forward if self._is_read_behind(node)]
        results = [twins[node] for node in self.backward if self._ends(node)]
        joint.output((needed, *outside, *results))
        module = fx.GraphModule(gm, joint)
        names = values_kept_for_backward(module, 1 + len(outside))
        return frozenset(node for node in self.forward if twins[node].name in names)

    def _is_read_behind(self, node: fx.Node) -> bool:
        return any(user not in self.forward and user not in self.backward for user in node.users)

    def _ends(self, node: fx.Node) -> bool:
        return not node.users or any(user not in self.backward for user in node.users)

    def recompute(self) -> int:
        """Copy what is not kept to just before the first node of the backward that reads it."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.backward:
            for source in self._not_kept(node.all_input_nodes, copies):
                with self.graph.inserting_before(node):
                    copy = self.graph.node_copy(source, lambda each: copies.get(each, each))
                copy.meta = {**source.meta, "autograd_backward": True}
                set_phase(copy, self.phase, again=True)
                copies[source] = copy
            for source in node.all_input_nodes:
                if source in copies:
                    node.replace_input_with(source, copies[source])
        for source in reversed(self.forward):
            if source in copies and not source.users:
                self.graph.erase_node(source)
        return len(copies)

    def _not_kept(
        self, sources: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]
    ) -> Iterator[fx.Node]:
        """What has to be computed again for ``sources``, inputs first."""
        pending = [(source, False) for source in reversed(sources)]
        seen: set[fx.Node] = set()
        while pending:
            node, has_inputs = pending.pop()
            if has_inputs:
                yield node
            elif node not in seen and node not in copies and self._is_given_up(node):
                seen.add(node)
                pending.append((node, True))
                pending += [(source, False) for source in reversed(node.all_input_nodes)]

    def _is_given_up(self, node: fx.Node) -> bool:
        return node in self.forward and node not in self.kept and _may_repeat(node)


def _needed(*values: object) -> None:
    """Stands in a graph that is never run."""


def _is_heavy(node: fx.Node) -> bool:
    has_flops = overload_packet(node.target) in flop_registry
    return is_launch(node) or has_flops or higher_order_name(node.target) is not None


def _may_repeat(node: fx.Node) -> bool:
    """Whether a second run of ``node`` gives what the first gave, and does nothing else."""
    marked = node.meta.get("recompute")
    asked = marked in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    if is_random(node.target):
        return False
    return asked or not (is_launch(node) or node.is_impure())
