"""``send``, ``recv``, ``isend``, ``irecv`` and their batch, in program order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dynamo_dist.tracing.functional import Group, coalesces, member, next_serial, rank_in
from dynamo_dist.tracing.operators import NO_PEER
from dynamo_dist.tracing.work import copy_back, only_wait, payload, start


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> dist.Work:
    """``dist.isend``."""
    here = member(group)
    peer = rank_in(here, dst, group_dst)
    token = torch.ops.dynamo_dist.isend(payload(tensor), peer, tag, here.group_name, next_serial())
    return start(only_wait, [token], [])


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> dist.Work:
    """``dist.irecv``; from any rank without a source."""
    here = member(group)
    peer = NO_PEER if src is None and group_src is None else rank_in(here, src, group_src)
    started = torch.ops.dynamo_dist.irecv(
        payload(tensor), peer, tag, here.group_name, next_serial()
    )
    return start(copy_back, [started], [tensor])


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """``dist.send``: an isend and its wait; ValueError for this rank itself."""
    here = member(group)
    _refuse_self(here, rank_in(here, dst, group_dst), "destination")
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """``dist.recv``: an irecv and its wait; the sender's global rank."""
    irecv(tensor, src, group, tag, group_src).wait()
    if src is not None:
        return src
    return dist.get_global_rank(member(group), group_src)  # type: ignore[arg-type]


def _refuse_self(group: dist.ProcessGroup, peer: int, kind: str) -> None:
    if group.rank() == peer:
        raise ValueError(
            f"Invalid {kind} rank: {kind} rank should not be the same as "
            "the rank of the current process."
        )


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """One launch where the backend coalesces, one for each operation elsewhere; as in eager
    mode.
    """
    first = p2p_op_list[0]
    here = member(first.group)
    if not coalesces(here, first.tensor.device):
        return [_single(op, here) for op in p2p_op_list]
    is_send = [op.op is dist.isend for op in p2p_op_list]
    started = torch.ops.dynamo_dist.isend_irecv_batch(
        [payload(op.tensor) for op in p2p_op_list],
        is_send,
        [op.group_peer for op in p2p_op_list],
        here.group_name,
        next_serial(),
    )
    outputs = [op.tensor for op in p2p_op_list if op.op is not dist.isend]
    received = [each for each, sends in zip(started, is_send) if not sends]  # noqa: B905
    tokens = [each for each, sends in zip(started, is_send) if sends]  # noqa: B905
    return [start(received_back, [*received, *tokens], outputs)]


def received_back(started: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish a batch: the receives first, then the sends' tokens."""
    copy_back(started[: len(outputs)], outputs)
    only_wait(started[len(outputs) :], [])


def _single(op: dist.P2POp, group: dist.ProcessGroup) -> dist.Work:
    if op.op is dist.isend:
        return isend(op.tensor, None, group, op.tag, op.group_peer)
    return irecv(op.tensor, None, group, op.tag, op.group_peer)
