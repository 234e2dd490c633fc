"""Which backward of a whole training step a node stands behind, and in which stage.

A graph that holds forward, backward and update in one is lowered without AOTAutograd's partition.
Values that only the backward reads may then be computed where the forward is, and stay alive until
they are read.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from inductor_passes.torch_compat.aot import tangents

STAGES = ("forward", "backward", "update")
# Of a node's meta: how many backwards began before it, whether it computes what another has, and
# one of STAGES.
_PHASE, _AGAIN = "inductor_passes_phase", "inductor_passes_again"
_STAGE = "inductor_passes_stage"


def mark_phases(graph: fx.Graph) -> bool:
    """Number the nodes by the backward that has begun last; return whether there is one.

    The graph is in the order of the program.
    """
    phase, last = 0, None
    for node in graph.nodes:
        # Autograd marks what it calls, and Dynamo what in the program called autograd.
        if node.meta.get("autograd_backward"):
            names = [name for name, _ in node.meta.get("source_fn_stack", ())]
            began = names[0] if names else last
            if began != last or phase == 0:
                phase, last = phase + 1, began
        node.meta[_PHASE] = phase
    for node in graph.nodes if phase else ():
        behind = "update" if node.meta[_PHASE] == phase else "forward"
        node.meta[_STAGE] = "backward" if node.meta.get("autograd_backward") else behind
    return phase > 0


def mark_joint(graph: fx.Graph) -> None:
    """Mark a joint graph of AOTAutograd's: its backward is what its tangents lead to, and what is
    tagged so.
    """
    behind = set(tangents(graph))
    for node in graph.nodes:
        tagged = "backward" in str(node.meta.get("partitioner_tag"))
        if tagged or any(each in behind for each in node.all_input_nodes):
            behind.add(node)
        is_backward = node in behind and node.op != "output"
        node.meta[_PHASE] = int(is_backward or node.op == "output")
        node.meta[_STAGE] = "backward" if is_backward else "forward"


def fill_phases(graph: fx.Graph) -> None:
    """Mark nodes that passes have added to a marked graph: they are needed where first read."""
    if _PHASE not in graph.output_node().meta:
        return
    last = last_phase(graph)
    for node in reversed(graph.nodes):
        if _PHASE not in node.meta:
            phases = [user.meta[_PHASE] for user in node.users]
            node.meta[_PHASE] = min(phases, default=last)
    for node in graph.nodes:
        if _STAGE not in node.meta:
            # A reduction that only the update reads is of the backward, where its input was made.
            sources = [stage_of(each) for each in node.all_input_nodes if each.op != "placeholder"]
            stages = sources or [stage_of(user) for user in node.users]
            node.meta[_STAGE] = max(stages, key=("", *STAGES).index, default="")


def set_phase(node: fx.Node, phase: int, *, again: bool) -> None:
    """Mark a node that is put into a backward's phase; ``again``: it computes what another one has
    computed, which was given up to save memory.
    """
    node.meta[_PHASE], node.meta[_AGAIN], node.meta[_STAGE] = phase, again, "backward"


def inherit_phase(node: fx.Node, like: fx.Node) -> None:
    """Mark a node that stands with another one."""
    node.meta.update({key: like.meta[key] for key in (_PHASE, _STAGE) if key in like.meta})


def clear_phases(graph: fx.Graph) -> None:
    """Take all marks away."""
    for node in graph.nodes:
        for key in (_PHASE, _AGAIN, _STAGE):
            node.meta.pop(key, None)


def computes_again(node: fx.Node) -> bool:
    """Return whether a node computes what was given up to save memory."""
    return bool(node.meta.get(_AGAIN))


def stage_of(node: fx.Node) -> str:
    """Return one of ``STAGES``; "" in a graph that is no whole training step.

    What stands between two backwards counts as forward, an update of another optimizer too.
    """
    stage: str = node.meta.get(_STAGE, "")
    return stage


def last_phase(graph: fx.Graph) -> int:
    """Return how many backwards a marked graph has."""
    return phase_of(graph.nodes) or 0


def phase_of(nodes: Iterable[fx.Node]) -> int | None:
    """Return the phase in which ``nodes`` together are needed; None if that is not known."""
    known = [node.meta[_PHASE] for node in nodes if _PHASE in node.meta]
    return max(known, default=None)
