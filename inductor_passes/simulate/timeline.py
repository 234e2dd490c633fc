"""Predict the execution of one graph: order and costs in, exposed time and peak memory out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost.model import CostModel
from inductor_passes.graph.aliasing import alias_source, is_small_result, written_to_input
from inductor_passes.graph.collectives import (
    blocking_kind,
    group_name,
    kind,
    output_bytes,
    released_bytes,
    role,
)
from inductor_passes.graph.phases import stage_of
from inductor_passes.records import SpanRecord, TimelineRecord
from inductor_passes.simulate.execution import Execution, Program, execute, live_bytes


def memory_owners(graph: fx.Graph) -> list[int]:
    """Position of the node whose memory each node's value is: its own, or that of a view's base.

    What the graph writes to an input at its end, such as an updated parameter, Inductor computes
    in the input's memory.
    """
    written = {
        _base(value): write.args[0]
        for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if (value := written_to_input(write))
    }
    position: dict[fx.Node, int] = {}
    owners: list[int] = []
    for i, node in enumerate(graph.nodes):
        position[node] = i
        source = alias_source(node)
        if source is None and node.op == "call_function":
            source = written.get(node)
        owners.append(i if source is None else owners[position[source]])
    return owners


def _base(node: fx.Node) -> fx.Node:
    while (source := alias_source(node)) is not None:
        node = source
    return node


def graph_live_bytes(
    graph: fx.Graph, owners: Sequence[int], awaits: Sequence[Sequence[int]]
) -> list[int]:
    """Bytes of a graph's own values while each node runs, in full even where Inductor fuses them
    away.

    Graph inputs and constants are not counted; outputs live to the end. Views and in-place results
    are their base's memory. A launch reads its input until its wait, or to the end if nothing
    waits.
    ``awaits[i]``: launches that node i waits for, as positions in the graph.
    """
    owner_of: dict[fx.Node, int] = {}
    fresh: list[int] = []
    last = list(range(len(owners)))
    read_by: dict[int, list[int]] = {}  # what a launch still reads until something waits for it
    unwaited: set[int] = set()
    for i, node in enumerate(graph.nodes):
        owner_of[node] = owners[i]
        fresh.append(value_bytes(node) if owners[i] == i else 0)
        inputs = [owner_of[used] for used in node.all_input_nodes]
        for owner in inputs:
            last[owner] = i
        if role(node) == "launch":
            # The link reads the input after the launch has returned.
            read_by[i] = inputs
            unwaited.add(i)
        for launch in awaits[i]:
            unwaited.discard(launch)
            for owner in read_by.get(launch, ()):
                last[owner] = i
    for launch in unwaited:
        for owner in read_by[launch]:
            # Never waited for in this graph: the link may read it until whoever gets the result
            # waits.
            last[owner] = len(last) - 1
    return live_bytes(fresh, last)


def value_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that a call makes on the device; 0 for inputs and constants.

    Negative for what gives an input's memory back.
    """
    if node.op != "call_function" or kind(node) == "offload":
        return 0
    apart = sum(output_bytes(user) for user in node.users if is_small_result(user))
    return output_bytes(node) - apart - released_bytes(node)


COMPUTE_LANE = "compute"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timeline of what one rank does: predicted, not measured.

    ``spans`` are in program order. Lane ``compute`` has spans of kind ``compute`` and, where the
    stream stands still, ``wait``; the lane of a process group has one span per collective, of its
    kind. ``exposed_us`` is the time that the compute stream waits, plus communication after its
    end: so ``makespan_us = compute_us + exposed_us``. ``exposed_by_launch`` splits it by the
    launch's node name. ``communication_us`` sums over all channels. ``peak_bytes`` leaves graph
    inputs out; ``memory`` is the curve that it is the top of: time and bytes wherever they change
    on the compute stream.
    ``live_bytes``: the same bytes by node, in program order.
    """

    spans: tuple[SpanRecord, ...]
    makespan_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    exposed_by_launch: Mapping[str, float]
    peak_bytes: int
    memory: tuple[tuple[float, int], ...]
    live_bytes: tuple[int, ...]

    def record(self) -> TimelineRecord:
        """The same as plain data that survives JSON; ``exposed_by_launch`` goes to the
        collectives' records.
        """
        return TimelineRecord(
            spans=self.spans,
            makespan_us=self.makespan_us,
            compute_us=self.compute_us,
            communication_us=self.communication_us,
            exposed_us=self.exposed_us,
            peak_bytes=self.peak_bytes,
            memory=self.memory,
        )


def simulate(graph: fx.Graph, cost: CostModel) -> Timeline:
    """Run ``graph`` in the order of its nodes on one compute stream and one channel per process
    group.

    The rules are those of ``execution.py``; a collective that returns only when it is done blocks
    the compute stream. Linear in nodes and edges. The graph is not changed.
    """
    nodes = list(graph.nodes)
    owners = memory_owners(graph)
    program = program_of(nodes, owners, cost)
    execution = execute(program)
    exposed = {
        node.name: execution.exposed[i] for i, node in enumerate(nodes) if program.channel[i]
    }
    live = graph_live_bytes(graph, owners, program.awaits)
    return Timeline(
        spans=_spans(nodes, program, execution),
        makespan_us=execution.makespan_us,
        compute_us=execution.compute_us,
        communication_us=execution.communication_us,
        exposed_us=execution.exposed_us,
        exposed_by_launch=exposed,
        peak_bytes=max(live, default=0),
        memory=_curve(live, program, execution),
        live_bytes=tuple(live),
    )


def program_of(nodes: Sequence[fx.Node], owners: Sequence[int], cost: CostModel) -> Program:
    """The numbers of a graph's nodes, one entry per node; ``owners`` as ``memory_owners`` has them.

    A wait is matched with the launch whose memory it waits on, through views and parts of a
    coalesced launch. A wait on a value launched outside the graph waits for nothing.
    """
    count = len(nodes)
    program = Program(
        [0.0] * count,
        [""] * count,
        [0.0] * count,
        [()] * count,
        slowdown=cost.compute_stretch,
    )
    launch_into: dict[int, int] = {}
    for i, node in enumerate(nodes):
        does = role(node)
        if does in ("launch", "blocking"):
            launch_into[owners[i]] = i
            # One channel per group, because NCCL runs a group's collectives on one stream, in
            # order.
            program.channel[i] = f"group {group_name(node)}"
            program.link_us[i] = cost.launch_us(node)
            # Awaiting itself is how a collective that blocks is written: it starts like a launch
            # and holds the compute stream to its end.
            program.awaits[i] = (i,) if does == "blocking" else ()
        elif does == "wait":
            program.awaits[i] = (launch_into[owners[i]],) if owners[i] in launch_into else ()
        else:
            program.compute_us[i] = cost.compute_us(node)
    return program


def _curve(
    live: Sequence[int], program: Program, execution: Execution
) -> tuple[tuple[float, int], ...]:
    """Bytes over time; of entries at one moment the most counts, and a launch is at the moment
    of the next.
    """
    curve: list[tuple[float, int]] = []
    most = 0
    for i, size in enumerate(live):
        most = max(most, size)
        if program.channel[i]:
            continue
        at = execution.start[i]
        if curve and curve[-1][0] == at:
            most = max(most, curve.pop()[1])
        if not curve or curve[-1][1] != most:
            curve.append((at, most))
        most = 0
    return tuple(curve)


def _spans(nodes: list[fx.Node], program: Program, execution: Execution) -> tuple[SpanRecord, ...]:
    spans: list[SpanRecord] = []
    for i, node in enumerate(nodes):
        start, end, blocked = execution.start[i], execution.end[i], execution.blocked[i]
        found: list[tuple[str, str, float, float]] = []
        if program.channel[i]:
            found.append((group_name(node), blocking_kind(node) or kind(node), start, end - start))
            start = end
        if blocked > 0:
            found.append((COMPUTE_LANE, "wait", start - blocked, blocked))
        if not program.channel[i] and end > start:
            found.append((COMPUTE_LANE, "compute", start, end - start))
        spans += [
            SpanRecord(lane, node.name, what, since, duration, stage=stage_of(node))
            for lane, what, since, duration in found
        ]
    return tuple(spans)
