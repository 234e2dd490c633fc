"""A process group whose ranks are threads: data moves at the wait, and until then results are
poison.

A launch copies what it sends and spoils what it will write; the wait delivers. So a wait that is
lost or comes too late changes numbers, which on real links it does only sometimes. Ranks that
launch something else than their peers get an error that names both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fuzzing._torch import BACKEND, threads_as_ranks
from fuzzing.turns import Turns

Tensors = Sequence[torch.Tensor]


class LaunchesDiffer(Exception):
    """Ranks of a group launch different collectives; the message has both."""


class Post:
    """What all ranks of one world have launched and sent. One for each run."""

    here: Post

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.launched: dict[tuple[str, int], dict[int, tuple[str, list[torch.Tensor]]]] = (
            defaultdict(dict)
        )
        self.sent: dict[tuple[str, int, int, int], list[torch.Tensor]] = defaultdict(list)
        self.received: dict[tuple[str, int, int, int], int] = defaultdict(int)


class Delivery(dist.Work):
    """A launched collective: ``wait`` delivers once."""

    def __init__(self, ready: Callable[[], bool], what: str, deliver: Callable[[], None]) -> None:
        super().__init__()
        self._ready, self._what, self._deliver = ready, what, deliver
        self._delivered = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._delivered:
            Post.here.turns.until(self._ready, self._what)
            with torch.no_grad():
                self._deliver()
            self._delivered = True
        return True

    def is_completed(self) -> bool:
        return self._delivered


def spoil(tensors: Tensors) -> None:
    """Fill with what no program computes."""
    for tensor in tensors:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)


def operation(opts: Any) -> Any:
    """The kind of reduction, which compares and prints well."""
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    return getattr(op, "op", op)


def reduced(op: Any, parts: Tensors) -> torch.Tensor:
    """The parts of all ranks in one, summed up in the order of ranks."""
    stacked = torch.stack(list(parts))
    names = {
        dist.ReduceOp.SUM: lambda: stacked.sum(0, dtype=stacked.dtype),
        dist.ReduceOp.AVG: lambda: stacked.sum(0, dtype=stacked.dtype) / len(parts),
        dist.ReduceOp.PRODUCT: lambda: stacked.prod(0, dtype=stacked.dtype),
        dist.ReduceOp.MIN: lambda: stacked.amin(0),
        dist.ReduceOp.MAX: lambda: stacked.amax(0),
    }
    return names[op]()


class TurnsGroup(dist.ProcessGroup):
    """One rank's end of a group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._count, self._name = rank, size, 0, ""

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _launch(
        self,
        what: str,
        sends: Tensors,
        writes: Tensors,
        deliver: Callable[[list[list[torch.Tensor]]], None],
    ) -> Delivery:
        """``deliver`` gets what each rank sends, by rank in the group."""
        slot = Post.here.launched[self._name, self._count]
        slot[self._rank] = (what, [tensor.detach().clone() for tensor in sends])
        number, self._count = self._count, self._count + 1
        spoil(writes)

        def finish() -> None:
            for rank, (other, _) in slot.items():
                if other != what:
                    raise LaunchesDiffer(
                        f"launch {number} of group {self._name!r} is {what} on rank {self._rank} "
                        f"and {other} on rank {rank}"
                    )
            deliver([slot[rank][1] for rank in range(self._size)])

        return Delivery(
            lambda: len(slot) == self._size,
            f"launch {number} of group {self._name!r}: {what}",
            finish,
        )

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Delivery:
        op = operation(opts)
        sizes = [tensor.numel() for tensor in tensors]

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for at, tensor in enumerate(tensors):
                tensor.detach().copy_(reduced(op, [part[at] for part in sent]))

        return self._launch(f"all_reduce {op} {sizes}", tensors, tensors, deliver)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Delivery:
        root, op = opts.rootRank, operation(opts)
        mine = tensors if self._rank == root else []

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for at, tensor in enumerate(mine):
                tensor.detach().copy_(reduced(op, [part[at] for part in sent]))

        return self._launch(f"reduce {op} to {root}", tensors, mine, deliver)

    def broadcast(self, tensors: Tensors, opts: Any) -> Delivery:
        root = opts.rootRank
        mine = tensors if self._rank != root else []

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for tensor, value in zip(mine, sent[root], strict=False):
                tensor.detach().copy_(value)

        sizes = [tensor.numel() for tensor in tensors]
        return self._launch(f"broadcast {sizes} from {root}", tensors, mine, deliver)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Delivery:
        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for at, into in enumerate(outputs):
                for tensor, part in zip(into, sent, strict=True):
                    tensor.detach().copy_(part[at])

        return self._launch("all_gather", inputs, [t for into in outputs for t in into], deliver)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Delivery:
        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for at, output in enumerate(outputs):
                whole = torch.cat([part[at].reshape(-1) for part in sent])
                output.detach().copy_(whole.view(output.shape))

        sizes = [tensor.numel() for tensor in inputs]
        return self._launch(f"all_gather {sizes}", inputs, outputs, deliver)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Delivery:
        return self.all_gather_single_coalesced([output], [given])

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Delivery:
        op = operation(opts)

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            outputs[0].detach().copy_(reduced(op, [part[self._rank] for part in sent]))

        return self._launch(f"reduce_scatter {op}", inputs[0], outputs, deliver)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Delivery:
        op = operation(opts)

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for at, output in enumerate(outputs):
                parts = [part[at].reshape(self._size, -1)[self._rank] for part in sent]
                output.detach().copy_(reduced(op, parts).view(output.shape))

        sizes = [tensor.numel() for tensor in inputs]
        return self._launch(f"reduce_scatter {op} {sizes}", inputs, outputs, deliver)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Delivery:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Delivery:
        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for output, part in zip(outputs, sent, strict=True):
                output.detach().copy_(part[self._rank])

        return self._launch("all_to_all", inputs, outputs, deliver)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Delivery:
        def pieces(tensor: torch.Tensor, splits: Sequence[int] | None) -> list[torch.Tensor]:
            even = tensor.shape[0] // self._size
            return list(tensor.split(list(splits) if splits else [even] * self._size))

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for piece, part in zip(pieces(output.detach(), output_splits), sent, strict=True):
                piece.copy_(part[self._rank])

        return self._launch("all_to_all_single", pieces(given, input_splits), [output], deliver)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any) -> Delivery:
        root = opts.rootRank
        sends = inputs[0] if self._rank == root else []

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            outputs[0].detach().copy_(sent[root][self._rank])

        return self._launch(f"scatter from {root}", sends, outputs, deliver)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any) -> Delivery:
        root = opts.rootRank
        into = outputs[0] if self._rank == root else []

        def deliver(sent: list[list[torch.Tensor]]) -> None:
            for tensor, part in zip(into, sent, strict=False):
                tensor.detach().copy_(part[0])

        return self._launch(f"gather to {root}", inputs, into, deliver)

    def barrier(self, opts: Any = None) -> Delivery:
        return self._launch("barrier", [], [], lambda sent: None)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Delivery:
        """Done once it is received: a link need not hold what nobody has asked for."""
        end = self._name, self._rank, to, tag
        messages, number = Post.here.sent[end], len(Post.here.sent[end])
        messages.append(tensors[0].detach().clone())
        return Delivery(
            lambda: Post.here.received[end] > number,
            f"rank {to} to receive message {number} of group {self._name!r}, tag {tag}",
            lambda: None,
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Delivery:
        end = self._name, source, self._rank, tag
        messages, number = Post.here.sent[end], Post.here.received[end]
        Post.here.received[end] += 1
        spoil(tensors)
        return Delivery(
            lambda: len(messages) > number,
            f"message {number} from rank {source} of group {self._name!r}, tag {tag}",
            lambda: tensors[0].detach().copy_(messages[number]),
        )

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(prefix_store: Any, rank: int, size: int, timeout: Any) -> TurnsGroup:
    return TurnsGroup(rank, size)


def on_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    """``body(rank)`` on ``size`` ranks, the default group initialised: results or exceptions, by
    rank.
    """
    turns, store = Turns(size), dist.HashStore()
    Post.here = Post(turns)

    def main(rank: int) -> Any:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
        try:
            return body(rank)
        finally:
            dist.destroy_process_group()

    with threads_as_ranks(_create):
        return turns.run(main)
