"""Lower collectives of c10d to functional ones: gather, reduce, scatter, broadcast, exchange,
barrier, coalesced.

Which manager is open for a group is known while tracing: ``c10d`` collects what is called
inside and hands it over at ``close_manager``.

AOTAutograd refuses an op whose result is its argument. The argument is in flight until the program
calls ``wait_tensor`` on it: ``work.traced_wait_tensor`` ends the launch there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.torch_compat import dynamo_building
from dynamo_dist.tracing.functional import (
    Group,
    barrier_device,
    member,
    next_serial,
    rank_in,
    seconds,
)
from dynamo_dist.tracing.operators import is_functional
from dynamo_dist.tracing.work import (
    Finish,
    copy_back,
    end,
    only_wait,
    padded_back,
    payload,
    split_back,
    start,
)


def all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """``all_reduce_``: the argument, in flight."""
    started = torch.ops._c10d_functional.all_reduce(input, reduce_op, group_name)
    start(copy_back, [started], [input])
    return input


def all_reduce_coalesced_(
    inputs: list[torch.Tensor], reduce_op: str, group_name: str
) -> list[torch.Tensor]:
    """``all_reduce_coalesced_``: the arguments, in flight, each with a wait of its own."""
    started = torch.ops._c10d_functional.all_reduce_coalesced(inputs, reduce_op, group_name)
    for each, buffer in zip(started, inputs):  # noqa: B905
        start(copy_back, [each], [buffer])
    return inputs


def broadcast_(input: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    """``broadcast_``: the argument, in flight. ``src`` is a rank of the group."""
    started = torch.ops._c10d_functional.broadcast(input, src, group_name)
    start(copy_back, [started], [input])
    return input


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
) -> torch.Tensor:
    """``all_gather_into_tensor_out``: ``out``, in flight."""
    started = torch.ops._c10d_functional.all_gather_into_tensor(input, group_size, group_name)
    start(copy_back, [started], [out])
    return out


def reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, *, out: torch.Tensor
) -> torch.Tensor:
    """``reduce_scatter_tensor_out``: ``out``, in flight."""
    started = torch.ops._c10d_functional.reduce_scatter_tensor(
        input, reduce_op, group_size, group_name
    )
    start(copy_back, [started], [out])
    return out


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_to_all_single``; split sizes count rows of dimension 0, even ones are the
    default.
    """
    here = member(group)
    size = here.size()
    # Functional all-to-all wants all sizes; c10d takes none, or an empty list, for even splits.
    received = list(output_split_sizes or [output.size(0) // size] * size)
    sent = list(input_split_sizes or [input.size(0) // size] * size)
    started = torch.ops._c10d_functional.all_to_all_single(
        payload(input), received, sent, here.group_name
    )
    return end(copy_back, [started], [output], async_op)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_to_all``: one flat launch, the tensors of each list may differ in size."""
    # Flat, because the tensors of a list may differ in shape and a collective has one buffer.
    parts = [payload(each).view(-1) for each in input_tensor_list]
    received = [payload(each).numel() for each in output_tensor_list]
    started = torch.ops._c10d_functional.all_to_all_single(
        torch.cat(parts), received, [part.numel() for part in parts], member(group).group_name
    )
    return end(split_back, [started], output_tensor_list, async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> dist.Work | None:
    """``dist.barrier``; a launch without data, which no pass may drop."""
    here = member(group)
    # An operator of ours: c10d's has no functional form, and the serial number keeps two barriers
    # apart.
    token = torch.ops.dynamo_dist.barrier(
        barrier_device(here, device_ids),
        device_ids or [],
        seconds(timeout),
        here.group_name,
        next_serial(),
    )
    return end(only_wait, [token], [], async_op)


def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """``dist.monitored_barrier``, gloo only; synchronous, as in eager mode."""
    token = torch.ops.dynamo_dist.monitored_barrier(
        seconds(timeout), wait_all_ranks, member(group).group_name, next_serial()
    )
    only_wait([token], [])


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Concatenated or stacked: ``output_tensor`` has the elements of all ranks, in any shape."""
    here = member(group)
    return end(copy_back, [start_all_gather(input_tensor, here)], [output_tensor], async_op)


def start_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One all-gather in flight, along dimension 0."""
    sent = payload(tensor)
    # An all-gather concatenates along dimension 0, which a number does not have.
    if sent.dim() == 0:
        sent = sent.view(1)
    return torch.ops._c10d_functional.all_gather_into_tensor(sent, group.size(), group.group_name)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_gather``: one flat launch; uneven sizes are padded to the longest."""
    here = member(group)
    sizes = [each.numel() for each in tensor_list]
    longest = max(sizes)
    finish: Finish
    # Equal sizes need no padding: the tensor is sent as it is.
    if min(sizes) == longest:
        finish, sent = split_back, tensor
    else:  # every rank knows every size, so all of them pad alike
        flat = payload(tensor).view(-1)
        finish = padded_back
        # Complex numbers are sent as pairs, which ``numel`` of the buffers does not count.
        width = longest * (2 if tensor.is_complex() else 1)
        sent = torch.nn.functional.pad(flat, (0, width - flat.numel()))
    return end(finish, [start_all_gather(sent, here)], tensor_list, async_op)


def coalesced_all_gather(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for several tensors, each gathered into a tensor of its own."""
    return end(copy_back, _start_coalesced(inputs, member(group)), outputs, async_op)


def _start_coalesced(inputs: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    flat = [payload(each).view(-1) for each in inputs]
    return list(
        torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
            flat, group.size(), group.group_name
        )
    )


def all_gather_coalesced(
    output_tensor_lists: list[list[torch.Tensor]],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> object:
    """``output_tensor_lists[rank][i]`` receives input ``i`` of that rank."""
    started = _start_coalesced(list(input_tensor_list), member(group))
    outputs = [
        output_tensor_lists[rank][i]
        # By input and then by rank, which is the order in which each launch's result lies.
        for i in range(len(input_tensor_list))
        for rank in range(len(output_tensor_lists))
    ]
    work = end(split_each_back, started, outputs, async_op)
    return work.get_future() if work is not None else None


def split_each_back(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish launches that each hold the elements of their share of the buffers, in order."""
    # Each launch has one result a rank.
    share = len(outputs) // len(started)
    for i, each in enumerate(started):
        split_back([each], outputs[i * share : (i + 1) * share])


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """``dist.gather``; ValueError for a list on the wrong ranks, as in eager mode."""
    here = member(group)
    # As in c10d: a rank of the job, also where the group lacks it, which is an error then.
    if dst is None and group_dst is None:
        dst = 0
    root = rank_in(here, dst, group_dst)
    if here.rank() == root:
        if not gather_list:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
        like = [payload(each) for each in gather_list]
        started = torch.ops.dynamo_dist.gather(payload(tensor), like, root, here.group_name)
        return end(copy_back, list(started), gather_list, async_op)
    if gather_list:
        raise ValueError("Argument ``gather_list`` must NOT be specified on non-destination ranks.")
    # Other ranks launch too; their results are empty, and nothing is copied.
    started = torch.ops.dynamo_dist.gather(payload(tensor), [], root, here.group_name)
    return end(only_wait, list(started), [], async_op)


# The function -> what to write instead.
FIXES = {
    "all_gather_object": "sizes = torch.empty(group.size(), dtype=torch.int64)\n"
    "    dist.all_gather_into_tensor(sizes, torch.tensor([n]))",
    "gather_object": "dist.gather(torch.tensor([n]), gather_list, dst=0)",
    "broadcast_object_list": "n = torch.tensor([n])\n    dist.broadcast(n, src=0)",
    "scatter_object_list": "n = torch.empty(1, dtype=torch.int64)\n"
    "    dist.scatter(n, [torch.tensor([i]) for i in values] if rank == 0 else None, src=0)",
    "send_object_list": "dist.send(torch.tensor([n]), dst)",
    "recv_object_list": "n = torch.empty(1, dtype=torch.int64)\n    dist.recv(n, src)",
}


def refuse(name: str) -> Any:
    """An answer to calls of ``name``: break the graph."""

    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        dynamo_building.graph_break(
            "Collective on Python objects",
            f"torch.distributed.{name}",
            f"{name} pickles objects and gives new ones on every call: they decide what the "
            "program does next, so a graph that holds one call's objects would be wrong for the "
            "next.",
            "Call it before the compiled function and pass the objects in, or send tensors:\n"
            f"    {FIXES[name]}",
        )

    return answer


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """``dist.all_reduce``."""
    name = member(group).group_name
    return end(copy_back, [start_all_reduce(payload(tensor), op, name)], [tensor], async_op)


def start_all_reduce(tensor: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """One all-reduce in flight, of the reduce ops that torch has and of those it lacks."""
    if is_functional(op):
        return torch.ops._c10d_functional.all_reduce(tensor, op, group_name)
    return torch.ops.dynamo_dist.all_reduce(tensor, op, group_name)


def all_reduce_coalesced(
    tensors: Any, op: str = "sum", group: Group = None, async_op: bool = False
) -> object:
    """``dist.all_reduce_coalesced``; a future if asynchronous, as in eager mode."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    work = coalesced_all_reduce(list(tensors), op, group, async_op)
    return work.get_future() if work is not None else None


def coalesced_all_reduce(
    tensors: list[torch.Tensor], op: str, group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for several tensors."""
    name = member(group).group_name
    inputs = [payload(tensor) for tensor in tensors]
    if is_functional(op):
        started = torch.ops._c10d_functional.all_reduce_coalesced(inputs, op, name)
    else:
        started = [start_all_reduce(each, op, name) for each in inputs]
    return end(copy_back, list(started), tensors, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """``dist.reduce``: other ranks than ``dst`` keep their buffer."""
    here = member(group)
    root = rank_in(here, dst, group_dst)
    started = torch.ops.dynamo_dist.reduce(payload(tensor), op, root, here.group_name)
    if here.rank() == root:
        return end(copy_back, [started], [tensor], async_op)
    return end(only_wait, [started], [], async_op)  # elsewhere the buffer stays as it is


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.reduce_scatter_tensor``: ``input`` concatenated or stacked, in any shape."""
    here = member(group)
    flat = payload(input)
    # c10d counts elements only, while the functional collective splits dimension 0.
    if flat.dim() == 0 or flat.size(0) % here.size() != 0:
        flat = flat.view(-1)
    return end(copy_back, [start_reduce_scatter(flat, op, here)], [output], async_op)


def start_reduce_scatter(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """One reduce-scatter in flight; dimension 0 is that of all ranks together."""
    if is_functional(op):
        return torch.ops._c10d_functional.reduce_scatter_tensor(
            tensor, op, group.size(), group.group_name
        )
    return torch.ops.dynamo_dist.reduce_scatter_tensor(tensor, op, group.size(), group.group_name)


def coalesced_reduce_scatter(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    op: str,
    group: Group,
    async_op: bool,
) -> dist.Work | None:
    """One launch for several tensors."""
    here = member(group)
    flat = [payload(each).view(-1) for each in inputs]
    if is_functional(op):
        started = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(
            flat, op, here.size(), here.group_name
        )
    else:
        started = [start_reduce_scatter(each, op, here) for each in flat]
    return end(copy_back, list(started), outputs, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.reduce_scatter`` of a list: one launch; uneven sizes are padded to the longest."""
    here = member(group)
    parts = [payload(each).view(-1) for each in input_list]
    longest = max([part.numel() for part in parts])
    rows = [
        part
        if part.numel() == longest
        else torch.nn.functional.pad(part, (0, longest - part.numel()))
        for part in parts
    ]
    started = start_reduce_scatter(torch.cat(rows), op, here)
    return end(split_back, [started], [output], async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """``dist.broadcast``."""
    here = member(group)
    root = rank_in(here, src, group_src)
    started = torch.ops._c10d_functional.broadcast(payload(tensor), root, here.group_name)
    return end(copy_back, [started], [tensor], async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """``dist.scatter``; ValueError for a list on the wrong ranks, as in eager mode."""
    here = member(group)
    if src is None and group_src is None:
        src = 0
    root = rank_in(here, src, group_src)
    inputs: list[torch.Tensor] = []
    if here.rank() == root:
        if not scatter_list:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
        inputs = [payload(each) for each in scatter_list]
    elif scatter_list:
        raise ValueError("Argument ``scatter_list`` must NOT be specified on non-source ranks.")
    started = torch.ops.dynamo_dist.scatter(inputs, payload(tensor), root, here.group_name)
    return end(copy_back, [started], [tensor], async_op)


class Coalesced:
    """The object that ``with _coalescing_manager() as cm`` gives: the launch's Work if
    ``async_ops``.
    """

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def append(self, work: dist.Work | None = None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def open_manager(group: Group) -> None:
    """From here on collectives of ``group`` are collected; answered while tracing."""


def close_manager(group: Group, async_ops: bool) -> dist.Work | None:
    """Launch what was collected; answered while tracing."""
    return None


@contextlib.contextmanager
def coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Coalesced]:
    """``dist._coalescing_manager``: one launch where the block ends."""
    # No ``try``: an error inside is raised before anything has been launched, as in c10d.
    open_manager(group)
    manager = Coalesced()
    yield manager
    manager.append(close_manager(group, async_ops))


def start_together(
    kind: str, calls: list[Any], op: str, group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for calls of one kind, each ``(input, output)``."""
    inputs = [call[0] for call in calls]
    outputs = [call[1] for call in calls]
    if kind == "all_reduce":
        return coalesced_all_reduce(inputs, op, group, async_op)
    if kind == "all_gather":
        return coalesced_all_gather(outputs, inputs, group, async_op)
    return coalesced_reduce_scatter(outputs, inputs, op, group, async_op)
