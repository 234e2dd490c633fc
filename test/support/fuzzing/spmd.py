"""Run one graph for all ranks on plain tensors, as late as a link may be: results arrive at the
wait.

Until its wait, what a launch writes is poison, and what it reads is read: a gather takes what its
input holds when it is waited for, as a copy engine may. An all_reduce copies its input first, in
eager mode and in Inductor's code. So a wait that is lost, a read before it and a write to what is
still being sent all change numbers, here always and on a machine sometimes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fuzzing.group import reduced, spoil
from torch import fx

from inductor_passes.graph.collectives import group_name, is_launch, is_wait, kind

Group = Sequence[Sequence[int]]  # a mesh dimension: the ranks of each of its groups
Values = list[Any]  # one a rank
# By storage: a launch's result, and what gives it its value.
Coming = dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]]


def run(
    graph: fx.Graph, inputs: Sequence[Values], groups: Mapping[str, Group]
) -> list[list[torch.Tensor]]:
    """What the graph returns, by rank; ``inputs`` has each placeholder's local value on every rank.

    Raises KeyError for a collective that it does not know.
    """
    ranks = len(inputs[0])
    given = iter(inputs)
    values: dict[fx.Node, Values] = {}
    coming: Coming = {}

    def of(argument: Any, rank: int) -> Any:
        return fx.node.map_arg(argument, lambda node: values[node][rank])

    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        calls = [of(node.args, rank) for rank in range(ranks)]
        if node.op == "output":
            return [list(returned) for (returned,) in calls]
        if is_wait(node):
            values[node] = [tensor for (tensor,) in calls]
            for tensor in values[node]:
                if found := coming.pop(_memory(tensor), None):
                    result, arriving = found
                    result.copy_(arriving())
        elif is_launch(node):
            values[node] = list(calls)
            for members in groups[group_name(node)]:
                _launch(node, members, calls, values[node], coming)
        else:
            assert callable(node.target)
            values[node] = [
                node.target(*calls[rank], **of(node.kwargs, rank)) for rank in range(ranks)
            ]
    raise ValueError("The graph has no output.")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _launch(
    node: fx.Node,
    members: Sequence[int],
    calls: Sequence[tuple[Any, ...]],
    results: Values,
    coming: Coming,
) -> None:
    """Put what the ranks of one group will get into ``results``, poisoned, and its arrival into
    ``coming``.
    """
    what, rest = kind(node), calls[0][1:]
    listed = isinstance(calls[0][0], list)
    sent = [calls[rank][0] if listed else [calls[rank][0]] for rank in members]
    if what == "all_reduce":
        sent = [[tensor.clone() for tensor in of_rank] for of_rank in sent]
    for place, rank in enumerate(members):
        made = []
        for at in range(len(sent[place])):
            arriving = partial(_ARRIVE[what], [of_rank[at] for of_rank in sent], place, rest)
            result = arriving().contiguous().clone()
            spoil([result])
            coming[_memory(result)] = (result, arriving)
            made.append(result)
        results[rank] = made if listed else made[0]


def _reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _exchanged(parts: Sequence[torch.Tensor], place: int, rest: tuple[Any, ...]) -> torch.Tensor:
    return torch.cat([part.split(rest[1])[place] for part in parts])


_ARRIVE: Mapping[str, Callable[[Sequence[torch.Tensor], int, tuple[Any, ...]], torch.Tensor]] = {
    "all_gather": lambda parts, place, rest: torch.cat(list(parts)),
    "all_reduce": lambda parts, place, rest: reduced(_reduction(rest[0]), parts),
    "all_to_all": _exchanged,
    "broadcast": lambda parts, place, rest: parts[rest[0]],
    "reduce_scatter": lambda parts, place, rest: reduced(_reduction(rest[0]), parts).chunk(
        len(parts)
    )[place],
}
