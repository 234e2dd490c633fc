"""Split a joint graph as ranks agree, before AOTAutograd makes a forward and a backward graph of
it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.cost import CostModel
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import pass_context, run_pass, selected_passes
from inductor_passes.ranks import decision as orders
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    LaunchPlan,
    frame_of_graph,
    number_launches,
)
from inductor_passes.ranks.decision import Joint, record_on_launches
from inductor_passes.ranks.protocol import GraphOffer
from inductor_passes.records import PassRecord
from inductor_passes.rewrite.narrow_gathers import narrowed_types
from inductor_passes.schedule.schedule_pass import CAP_BYTES
from inductor_passes.torch_compat import aot

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession

log = logging.getLogger(__name__)


def cut_joint(
    graph: fx.Graph,
    options: PassOptions,
    cost: CostModel,
    *,
    graph_id: str,
    told: str,
    session: CompileSession | None,
) -> Joint | None:
    """Split a joint graph in place or leave it whole, the same on all ranks, and record the choice.

    The launches of the graph carry the choice. ``told``: a digest of all that the choice depends
    on. Returns None, and asks no other rank, if no pass would split the graph.
    """
    chosen = selected_passes(pass_context(cost, options, False), options)
    cutting = [each for each in chosen if each.runs_on_joint]
    if not cutting:
        return None

    def run(trial: fx.Graph, plan: LaunchPlan | None, keep: bool) -> PassRecord | None:
        if plan is None and keep:
            return None
        pass_ = cutting[0] if plan is None else cutting[0].following(plan)
        return None if pass_ is None else run_pass(pass_, trial)

    job = orders.current()
    trace = number_launches(
        graph,
        orders.ranks_of,
        frame_of_graph(),
        phase="joint",
        graph_id=graph_id,
        options=f"{told} {narrowed_types(graph)}".strip(),
    )
    if job is None or not trace.launches:
        record = run(graph, None, False)
        assert record is not None
        joint = Joint("cut" if record.changed else PROGRAM, None, record)
    else:
        offer = GraphOffer(graph, trace, run)
        decision = job.decide(trace, session.offer(trace, offer) if session else offer)
        log.info("Graph %s: parts %s", graph_id, decision.how)
        made = None if decision.plan == PROGRAM else offer.carry_out(decision.plan)
        joint = Joint(decision.plan, trace, made)
    graph.output_node().meta.pop(CAP_BYTES, None)  # is of both halves together
    record_on_launches(graph, joint)
    return joint


def keep_before_writes(graph: fx.Graph) -> None:
    """Copy inputs that forward reads and then writes, where backward may need what was read.

    Torch's partition takes an input for a value that backward can have at no cost, and computes
    from it again what forward computed. By then the write at the end of forward has changed it:
    gradients are silently wrong (seen in 2.13, a buffer that a training forward reads and updates).
    """
    writes = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if node.args[0].op == "placeholder"
    ]
    if not writes or not aot.is_joint(graph):
        return
    of_backward = _behind(aot.tangents(graph))
    for write in writes:
        source = write.args[0]
        if not of_backward & _behind([source]):
            continue
        with graph.inserting_after(source), source.meta["val"].fake_mode:
            copied = graph.call_function(torch.ops.aten.clone.default, (source,))
            copied.meta["val"] = source.meta["val"].clone()
        # The partition keeps it: a copy that backward makes would be one of the changed input.
        copied.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for user in [each for each in source.users if each not in (copied, *writes)]:
            user.replace_input_with(source, copied)


def _behind(nodes: list[fx.Node]) -> set[fx.Node]:
    """These nodes and all that are computed from them; a write to an input is the end."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.target is not torch.ops.aten.copy_.default:
            found.add(node)
            waiting.extend(node.users)
    return {node for node in found if node.op != "output"}
