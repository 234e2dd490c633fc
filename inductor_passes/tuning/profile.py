"""Profiles of all ranks -> times of a graph whose kernels run on a device, by the names of its nodes.

Launches and matrix products stand in the code in the order of the graph, so that the n-th of a profile is the n-th of the graph. A
fused kernel of Inductor's bears the operators in it: its time goes to those nodes between the same two launches. What else ran
there is shared out to all of them. Compute counts as on the slowest rank; a collective's kernel lasts longer where it waits for a
rank that is late, so that the shortest of all ranks counts.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from inductor_passes.errors import TimesError
from inductor_passes.machine.importing.kineto_calls import Call, Kernel, calls
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime
from inductor_passes.records import GraphRecord, NodeRecord

_FUSED = re.compile(r"triton_[a-z]+_fused_(.*?)_?[0-9]*")


def times_of_profiles(record: GraphRecord, profiles: Mapping[int, Any]) -> GraphTimes:
    """Times of a graph from what ``export_chrome_trace`` wrote on each rank, by rank.

    Calls of other graphs are left out, as is each rank's first of this one, which may compile kernels. Raises TimesError if nothing is left, and
    TopologyError for what is no profile.
    """
    own = {
        rank: [call for call in calls(profile, f"of rank {rank}") if _is_of(record, call)][1:]
        for rank, profile in profiles.items()
    }
    count = min(map(len, own.values()), default=0)
    if not count:
        raise TimesError(
            f"The profiles hold no second call of the {record.phase} graph {record.graph_id}.",
            "Its collectives and matrix products, in order, are those of no call between Inductor's marks.",
            "Profile several steps, with CPU and CUDA activities, on every rank.",
        )
    by_rank = {rank: [_call_us(record, call) for call in ran[:count]] for rank, ran in own.items()}
    nodes = {}
    for node in record.nodes:
        if node.event in ("launch", "wait") or not node.original:
            continue
        us = max(
            statistics.median(call.get(node.name, 0.0) for call in ran) for ran in by_rank.values()
        )
        nodes[node.name] = NodeTime(node.operator, us, node.predicted_us, node.dtype, node.product)
    launches = {}
    for node in record.nodes:
        if node.event == "launch":
            collective = record.collectives[node.number]
            us = statistics.median(
                min(ran[call][node.name] for ran in by_rank.values()) for call in range(count)
            )
            launches[node.name] = LaunchTime(
                collective.kind,
                collective.group_size,
                max(1, node.hosts),
                collective.payload_bytes,
                us,
                node.predicted_us,
            )
    return GraphTimes(record.phase, nodes, launches)


def _is_of(record: GraphRecord, call: Call) -> bool:
    """Return whether a call launches what the graph does, with as many products between launches."""
    kinds = [collective.kind for collective in record.collectives]
    return [kernel.collective for kernel in call if kernel.collective] == kinds and [
        sum(kernel.product for kernel in segment) for segment in _cut(call)
    ] == [sum(node.event == "kernel" for node in segment) for segment in _segments(record)]


def _cut(call: Call) -> list[list[Kernel]]:
    """Kernels that compute, between collectives."""
    found: list[list[Kernel]] = [[]]
    for kernel in call:
        if kernel.collective:
            found.append([])
        else:
            found[-1].append(kernel)
    return found


def _segments(record: GraphRecord) -> list[list[NodeRecord]]:
    """Nodes that compute, between launches."""
    found: list[list[NodeRecord]] = [[]]
    for node in record.nodes:
        if node.event == "launch":
            found.append([])
        elif node.event != "wait":
            found[-1].append(node)
    return found


def _call_us(record: GraphRecord, call: Call) -> dict[str, float]:
    """Time of each node and launch in one call, by name; they add up to that of all kernels."""
    launches = [node.name for node in record.nodes if node.event == "launch"]
    took = [kernel.us for kernel in call if kernel.collective]
    found = defaultdict(float, zip(launches, took, strict=True))
    carried = 0.0
    for nodes, kernels in zip(_segments(record), _cut(call), strict=True):
        products = [node for node in nodes if node.event == "kernel"]
        others = [node for node in nodes if node.event != "kernel"]
        rest = carried
        clocked = [kernel.us for kernel in kernels if kernel.product]
        for node, us in zip(products, clocked, strict=True):
            found[node.name] += us
        for kernel in kernels:
            if not kernel.product:
                fused = [node for node in others if _is_fused(node, kernel.name)]
                _share(found, fused, kernel.us)
                rest += 0.0 if fused else kernel.us
        _share(found, others or products, rest)
        carried = 0.0 if nodes else rest
    if carried:
        computing = [node for segment in _segments(record) for node in segment]
        _share(found, computing, carried)
    return dict(found)


def _is_fused(node: NodeRecord, kernel: str) -> bool:
    match = _FUSED.fullmatch(kernel)
    if match is None:
        return False
    parts = node.operator.split(".")
    return f"_{parts[1] if len(parts) > 1 else parts[0]}_" in f"_{match[1]}_"


def _share(found: dict[str, float], nodes: Sequence[NodeRecord], us: float) -> None:
    """Share a time out to nodes, in proportion to their predicted ones."""
    total = sum(node.predicted_us for node in nodes)
    for node in nodes:
        found[node.name] += us * (node.predicted_us / total if total > 0 else 1 / len(nodes))
