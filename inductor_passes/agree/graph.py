"""A graph's stream of launches, read off its nodes, and what its passes made of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.agree.plan import LaunchPlan, Planned
from inductor_passes.agree.stream import Group, Launch, Stream, digest
from inductor_passes.graph.collectives import (
    MEMBERS,
    group_name,
    input_tensors,
    is_coalesced,
    is_launch,
    kind,
    payload_bytes,
    reduce_op,
)
from inductor_passes.graph.printing import frames_of, user_line
from inductor_passes.records import ONE_SIDED, OWN_SHARES
from inductor_passes.torch_compat import c10d, dynamo

# Global ranks of a group that moves data, by name; None for any other.
RanksOf = Callable[[str], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """The compiled frame that a graph is of. ``partial``, ``root``: as ``Stream`` has them."""

    partial: bool = False
    root: str = ""


def frame_of_graph() -> Frame:
    """The frame that Dynamo compiles now; an empty one outside of a compile."""
    return Frame(*dynamo.frame_in_work())


def number_launches(
    graph: fx.Graph,
    ranks_of: RanksOf,
    frame: Frame,
    *,
    phase: str,
    graph_id: str,
    options: str = "",
) -> Stream:
    """The graph's stream; each of its launches is given its number."""
    groups: list[Group] = []
    numbers: dict[str, int] = {}
    launches: list[Launch] = []
    for node in graph.nodes:
        node.meta.pop(MEMBERS, None)
        if not is_launch(node):
            continue
        name = group_name(node)
        if name not in numbers:
            ranks = ranks_of(name)
            if ranks is None or len(ranks) < 2:
                continue
            numbers[name] = len(groups)
            groups.append(Group(c10d.own_name(name), ranks))
        node.meta[MEMBERS] = (len(launches),)
        path, files = _path(node)
        launches.append(
            Launch(what(node), numbers[name], path, _agreed_bytes(node), user_line(node), files)
        )
    return Stream(
        tuple(groups),
        tuple(launches),
        phase == "backward",
        frame.partial,
        frame.root,
        graph_id,
        options,
        is_joint=phase == "joint",
    )


def place_of(traced: fx.Graph) -> str:
    """A digest of where a graph as Dynamo traced it stands in the program: its frame, and the lines of its nodes.

    Launches are known by these. Code from a cache has them as they were when it was made, so that it serves only
    where they still are.
    """
    frame = frame_of_graph()
    with_own_stack = {node.stack_trace: node for node in traced.nodes}.values()
    return digest([frame.partial, frame.root, *(_path(node)[0] for node in with_own_stack)])


def what(launch: fx.Node) -> str:
    """Describe what ranks must launch alike, sizes left out: kind, reduction, whether coalesced, type."""
    parts = [kind(launch)]
    if (op := reduce_op(launch)) is not None:
        parts.append(op)
    tensors = list(input_tensors(launch))
    if is_coalesced(launch):
        parts.append(f"coalesced of {len(tensors)}")
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "nothing"
    return " ".join([*parts, dtype])


def plan_of(graph: fx.Graph) -> LaunchPlan:
    """Return the plan by which the graph launches now on groups of several ranks."""
    found = []
    for node in graph.nodes:
        if is_launch(node) and (members := node.meta.get(MEMBERS)):
            found.append(Planned(tuple(members), what(node)))
    return LaunchPlan(tuple(found))


def _path(node: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Functions and lines that lead to a node, and their files."""
    frames = frames_of(node)
    return (
        tuple(f"{dynamo.without_resuming(each['function'])}:{each['line']}" for each in frames),
        tuple(os.path.basename(each["file"]) for each in frames),
    )


def _agreed_bytes(launch: fx.Node) -> int | None:
    if kind(launch) in ONE_SIDED | OWN_SHARES:
        return None
    for tensor in input_tensors(launch):
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            return None
    return payload_bytes(launch)
