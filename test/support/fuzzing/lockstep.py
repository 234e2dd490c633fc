"""Run the graphs of all ranks in this process, with true numbers: for tests of passes.

Each rank has a graph of its own, so that a pass which decided differently on one of them is seen as
what it would be on a machine: a hang, or a mix of collectives that do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from inductor_passes.errors import PassesError
from inductor_passes.graph.collectives import group_name, is_wait, kind, role

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
_Rank = Generator[tuple[fx.Node, tuple[Any, ...]], Any, Any]


class LockstepError(PassesError):
    """Ranks launched different collectives, or wait for each other for ever."""


def run_in_lockstep(
    graphs: Sequence[fx.Graph],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[int]] | None = None,
) -> list[Any]:
    """Run the ranks' graphs in lockstep, and return what each rank's graph returns for its inputs.

    ``graphs`` has a graph per rank, ``inputs`` its placeholders' values (local shapes), ``groups``
    the ranks of each group by name; the default is one group ``"0"`` of all. Knows all_gather,
    all_reduce, reduce_scatter, all_to_all, broadcast and DTensor's shard_dim_alltoall. Raises
    LockstepError if ranks of a group launch different collectives, and where they would hang.
    """
    groups = groups or {"0": range(len(graphs))}
    ranks = [_run(graph, given) for graph, given in zip(graphs, inputs, strict=True)]
    results: list[Any] = [None] * len(ranks)
    waiting: dict[int, tuple[fx.Node, tuple[Any, ...]]] = {}

    def advance(rank: int, value: object) -> None:
        try:
            waiting[rank] = ranks[rank].send(value)
        except StopIteration as end:
            results[rank] = end.value

    for rank in range(len(ranks)):
        advance(rank, None)
    while waiting:
        for members in groups.values():
            if all(r in waiting and groups[group_name(waiting[r][0])] is members for r in members):
                calls = [waiting.pop(r) for r in members]
                for rank, value in zip(members, _collective(calls), strict=True):
                    advance(rank, value)
                break
        else:
            at = {rank: str(node.format_node()) for rank, (node, _) in waiting.items()}
            raise LockstepError(f"These ranks would wait for ever: {at}.")
    return results


def _run(graph: fx.Graph, given: Sequence[Any]) -> _Rank:
    values: dict[fx.Node, Any] = {}
    inputs = iter(given)
    for node in graph.nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "output":
            return args[0]
        elif is_wait(node):
            values[node] = args[0]
        elif role(node):
            values[node] = yield node, args
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    return None


def _collective(calls: Sequence[tuple[fx.Node, tuple[Any, ...]]]) -> list[Any]:
    """What each rank's launch returns; a coalesced one returns a tensor for each that it is
    given.
    """
    if not isinstance(calls[0][1][0], (list, tuple)):
        return _of_one(calls)
    if len({len(args[0]) for _, args in calls}) > 1:
        raise LockstepError("Ranks of one group launch different numbers of tensors at once.")
    each = zip(*([(node, (t, *args[1:])) for t in args[0]] for node, args in calls), strict=True)
    return [list(of_rank) for of_rank in zip(*map(_of_one, each), strict=True)]


def _of_one(calls: Sequence[tuple[fx.Node, tuple[Any, ...]]]) -> list[torch.Tensor]:
    name = kind(calls[0][0]) or "shard_dim_alltoall"
    first = 3 if name == "all_to_all" else 1  # how much each rank sends is its own affair
    said = {(str(node.target), args[0].dtype, str(args[first:])) for node, args in calls}
    shapes = {tuple(args[0].shape) for _, args in calls}
    if len(said) > 1 or (len(shapes) > 1 and name != "all_to_all"):
        raise LockstepError(f"Ranks of one group launch different collectives: {said}, {shapes}.")
    tensors = [args[0].contiguous() for _, args in calls]
    ranks, args = len(calls), calls[0][1]
    if name == "all_gather":
        return [torch.cat(tensors)] * ranks
    if name == "all_reduce":
        return [_REDUCTIONS[args[1]](torch.stack(tensors))] * ranks
    if name == "reduce_scatter":
        return list(_REDUCTIONS[args[1]](torch.stack(tensors)).chunk(ranks))
    if name == "broadcast":
        return [tensors[args[1]]] * ranks
    if name == "all_to_all":
        parts = [t.split(call[1][2]) for t, call in zip(tensors, calls, strict=True)]
        for rank, (_, of_rank) in enumerate(calls):
            if [len(parts[source][rank]) for source in range(ranks)] != list(of_rank[1]):
                raise LockstepError(f"Rank {rank} is sent other sizes than {of_rank[1]}.")
        return [
            torch.cat([parts[source][rank] for source in range(ranks)]) for rank in range(ranks)
        ]
    if name == "shard_dim_alltoall":
        _, gather_dim, shard_dim, _ = args
        return list(torch.cat(tensors, gather_dim).chunk(ranks, shard_dim))
    raise NotImplementedError(name)
