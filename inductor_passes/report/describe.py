"""From a graph and its simulated timelines to the record that reports are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph import collectives as c
from inductor_passes.graph.printing import cause, user_line
from inductor_passes.order_pinning import has_own_kernel
from inductor_passes.records import (
    CollectiveRecord,
    GraphRecord,
    PassRecord,
    TimelineRecord,
)
from inductor_passes.report.figures import PlannedGraph, figures_of
from inductor_passes.simulate import Timeline
from inductor_passes.simulate.timeline import COMPUTE_LANE


def describe(
    graph: fx.Graph,
    cost: CostModel,
    *,
    before: Timeline,
    after: Timeline,
    passes: Sequence[PassRecord],
    phase: str,
    graph_id: str,
) -> GraphRecord:
    """The record of one graph, after its passes and before its order is pinned."""
    warnings: list[str] = []
    schedule = next((p.schedule for p in passes if p.schedule is not None), None)
    why = {item.name: item.reason for item in schedule.exposed} if schedule is not None else {}
    if schedule is not None and schedule.left_alone:
        why = {name: "no gain" for name, us in after.exposed_by_launch.items() if us > 0}
    if schedule is not None and schedule.fixed:
        warnings.append(
            f"nothing could be moved past {', '.join(schedule.fixed)}: effects stay in place"
        )
    return GraphRecord(
        graph_id=graph_id,
        phase=phase,
        node_count=len(graph.nodes),
        topology=cost.name,
        passes=tuple(passes),
        collectives=tuple(_collective(n, cost, before, after, why) for n in c.launches(graph)),
        before=before.record(),
        after=_with_reasons(after.record(), why),
        order=tuple(order_events(graph)),
        warnings=tuple(warnings),
        figures=figures_of(PlannedGraph(graph, cost, before, after)),
    )


def _with_reasons(timeline: TimelineRecord, why: Mapping[str, str]) -> TimelineRecord:
    """The same timeline; collectives that are exposed bear the reason."""
    spans = tuple(
        dataclasses.replace(span, why_exposed=why[span.name])
        if span.lane != COMPUTE_LANE and span.name in why
        else span
        for span in timeline.spans
    )
    return dataclasses.replace(timeline, spans=spans)


def order_events(graph: fx.Graph) -> list[str]:
    """Launches, waits and kernels of their own, in order, in words that generated code can be held
    against.

    ``launch KIND GROUP``, ``wait N`` (of the N-th launch of the graph) and ``kernel``.
    """
    events: list[str] = []
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if c.is_launch(node):
            number[node] = len(number)
            events.append(f"launch {c.kind(node)} {c.group_name(node)}")
        elif c.is_wait(node):
            launch = c.launch_of(node)
            if launch is not None:
                events.append(f"wait {number[launch]}")
        elif has_own_kernel(node):
            events.append("kernel")
    return events


def _collective(
    node: fx.Node, cost: CostModel, before: Timeline, after: Timeline, why: Mapping[str, str]
) -> CollectiveRecord:
    return CollectiveRecord(
        name=node.name,
        kind=c.kind(node),
        group_name=c.group_name(node),
        group_size=c.group_size(node),
        payload_bytes=c.payload_bytes(node),
        dtype=c.dtype_name(node),
        reduce_op=c.reduce_op(node),
        stack=user_line(node),
        predicted_us=cost.launch_us(node),
        exposed_before_us=before.exposed_by_launch.get(node.name, 0.0),
        exposed_after_us=after.exposed_by_launch.get(node.name, 0.0),
        why_exposed=why.get(node.name, ""),
        cause=cause(node),
    )
