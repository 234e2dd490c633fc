"""Collectives that torch's functional ones lack, as operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.torch_compat import c10d
from inductor_passes.graph import collectives

NAMESPACE = "dynamo_dist"
PREMUL_SUM = "premul_sum"
NO_PEER = -1  # receive from any rank

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
collectives.register_namespace(NAMESPACE)


def reduce_op_name(op: object) -> str | None:
    """``ReduceOp.SUM`` as "sum"; a premultiplied sum carries its factor, "premul_sum 2.0".

    None for what no string can say: a factor that is a tensor, or an op unknown to us.
    """
    if isinstance(op, str):
        return op.lower()
    kind, factor = op, None
    if type(op) is dist.ReduceOp:
        state: Any = op.__getstate__()
        kind, factor = state
    name = kind.name.lower() if isinstance(kind, dist.ReduceOp.RedOpType) else ""
    if name == PREMUL_SUM:
        return f"{PREMUL_SUM} {factor!r}" if isinstance(factor, float) else None
    return name if name in _REDUCE_OPS else None


def is_functional(reduce_op: str) -> bool:
    """Return whether torch's own functional collectives take this reduce op."""
    return reduce_op in _REDUCE_OPS


def _reduce_op(reduce_op: str) -> Any:
    name, _, factor = reduce_op.partition(" ")
    if name == PREMUL_SUM:
        return c10d.premul_sum(float(factor))
    return getattr(dist.ReduceOp, name.upper())


def _options(kind: str, **values: object) -> Any:
    options = c10d.collective_options(kind)
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _launched(work: object, results: Sequence[torch.Tensor]) -> None:
    if work is not None:
        for result in results:
            c10d.register_work(result, work)


def _token(device: torch.device | str) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)


def _contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """Sum what each rank multiplies by the factor first."""
    result = _contiguous_copy(tensor)
    options = _options("Allreduce", reduceOp=_reduce_op(reduce_op), asyncOp=True)
    _launched(c10d.resolve_process_group(group_name).allreduce([result], options), [result])
    return result


def reduce_scatter_tensor(
    tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str
) -> torch.Tensor:
    """The same, scattered along dimension 0."""
    result = _scattered(tensor, group_size)
    options = _options("ReduceScatter", reduceOp=_reduce_op(reduce_op), asyncOp=True)
    launch = c10d.resolve_process_group(group_name).reduce_scatter_single
    _launched(launch(result, _contiguous_copy(tensor), options), [result])
    return result


def _scattered(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    return tensor.new_empty((tensor.size(0) // group_size, *tensor.shape[1:]))


def reduce(tensor: torch.Tensor, reduce_op: str, dst: int, group_name: str) -> torch.Tensor:
    """The reduced tensor on ``dst``; undefined elsewhere."""
    result = _contiguous_copy(tensor)
    options = _options("Reduce", reduceOp=_reduce_op(reduce_op), rootRank=dst, asyncOp=True)
    _launched(c10d.resolve_process_group(group_name).reduce([result], options), [result])
    return result


def gather(
    tensor: torch.Tensor, buffers: list[torch.Tensor], dst: int, group_name: str
) -> list[torch.Tensor]:
    """On ``dst`` what each rank sent, in shapes of ``buffers``; elsewhere, where they are none,
    a token.
    """
    results = [_contiguous_copy(each) for each in buffers]
    waited = results or [_token(tensor.device)]
    options = _options("Gather", rootRank=dst, asyncOp=True)
    group = c10d.resolve_process_group(group_name)
    _launched(
        group.gather([results] if results else [], [_contiguous_copy(tensor)], options), waited
    )
    return waited


def scatter(
    tensors: list[torch.Tensor], buffer: torch.Tensor, src: int, group_name: str
) -> torch.Tensor:
    """This rank's tensor, in the shape of ``buffer``; ``tensors`` is empty except on ``src``."""
    result = _contiguous_copy(buffer)
    sent = [[_contiguous_copy(tensor) for tensor in tensors]] if tensors else []
    options = _options("Scatter", rootRank=src, asyncOp=True)
    _launched(c10d.resolve_process_group(group_name).scatter([result], sent, options), [result])
    return result


def isend(tensor: torch.Tensor, dst: int, tag: int, group_name: str, serial: int) -> torch.Tensor:
    """Send to ``dst``; a token."""
    token = _token(tensor.device)
    group = c10d.resolve_process_group(group_name)
    _launched(group.send([_contiguous_copy(tensor)], dst, tag), [token])
    return token


def irecv(buffer: torch.Tensor, src: int, tag: int, group_name: str, serial: int) -> torch.Tensor:
    """Return the tensor that ``src`` sent, in the shape of ``buffer``."""
    result = _contiguous_copy(buffer)
    group = c10d.resolve_process_group(group_name)
    work = group.recv_anysource([result], tag) if src == NO_PEER else group.recv([result], src, tag)
    _launched(work, [result])
    return result


def isend_irecv_batch(
    tensors: list[torch.Tensor], is_send: list[bool], peers: list[int], group_name: str, serial: int
) -> list[torch.Tensor]:
    """Sends and receives in one launch of the backend: a token or what came, for each."""
    group, device = c10d.resolve_process_group(group_name), tensors[0].device
    results = []
    group._start_coalescing(device)
    for tensor, sends, peer in zip(tensors, is_send, peers, strict=True):
        if sends:
            group.send([_contiguous_copy(tensor)], peer, 0)
            results.append(_token(device))
        else:
            results.append(_contiguous_copy(tensor))
            group.recv([results[-1]], peer, 0)
    _launched(group._end_coalescing(device), results)
    return results


def barrier(
    device: torch.device, device_ids: list[int], timeout_s: float, group_name: str, serial: int
) -> torch.Tensor:
    """A token that comes when all ranks are here; a negative timeout stands for the group's."""
    token = _token(device)
    options = _options("Barrier", asyncOp=True, device=device)
    if device_ids:
        options.device_ids = device_ids
    if timeout_s >= 0:
        options.timeout = timedelta(seconds=timeout_s)
    _launched(c10d.resolve_process_group(group_name).barrier(opts=options), [token])
    return token


def monitored_barrier(
    timeout_s: float, wait_all_ranks: bool, group_name: str, serial: int
) -> torch.Tensor:
    """The same with rank 0 watching; it has waited when it returns."""
    group = c10d.resolve_process_group(group_name)
    timeout = timedelta(seconds=timeout_s) if timeout_s >= 0 else None
    dist.monitored_barrier(group, timeout, wait_all_ranks)
    return _token("cpu")


def wait_tensor(token: torch.Tensor, serial: int) -> torch.Tensor:
    """Wait for a launch whose result nobody reads; no pass may drop this."""
    torch.ops._c10d_functional.wait_tensor(token)
    return _token(token.device)


# Schema -> what runs, and what a compiler is told of the results.
_OPS: tuple[tuple[str, Callable[..., object], Callable[..., object]], ...] = (
    (
        "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor",
        all_reduce,
        lambda tensor, reduce_op, group_name: _like(tensor),
    ),
    (
        "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> "
        "Tensor",
        reduce_scatter_tensor,
        lambda tensor, reduce_op, group_size, group_name: _scattered(tensor, group_size),
    ),
    (
        "reduce(Tensor input, str reduce_op, int dst, str group_name) -> Tensor",
        reduce,
        lambda tensor, reduce_op, dst, group_name: _like(tensor),
    ),
    (
        "gather(Tensor input, Tensor[] buffers, int dst, str group_name) -> Tensor[]",
        gather,
        lambda tensor, buffers, dst, group_name: (
            [_like(each) for each in buffers] or [_token(tensor.device)]
        ),
    ),
    (
        "scatter(Tensor[] inputs, Tensor buffer, int src, str group_name) -> Tensor",
        scatter,
        lambda tensors, buffer, src, group_name: _like(buffer),
    ),
    (
        "isend(Tensor input, int dst, int tag, str group_name, int serial) -> Tensor",
        isend,
        lambda tensor, dst, tag, group_name, serial: _token(tensor.device),
    ),
    (
        "irecv(Tensor input, int src, int tag, str group_name, int serial) -> Tensor",
        irecv,
        lambda buffer, src, tag, group_name, serial: _like(buffer),
    ),
    (
        "isend_irecv_batch(Tensor[] tensors, bool[] is_send, int[] peers, str group_name, int "
        "serial)"
        " -> Tensor[]",
        isend_irecv_batch,
        lambda tensors, is_send, peers, group_name, serial: [
            _token(tensor.device) if sends else _like(tensor)
            for tensor, sends in zip(tensors, is_send, strict=True)
        ],
    ),
    (
        "barrier(Device device, int[] device_ids, float timeout_s, str group_name, int serial) -> "
        "Tensor",
        barrier,
        lambda device, device_ids, timeout_s, group_name, serial: _token(device),
    ),
    (
        "monitored_barrier(float timeout_s, bool wait_all_ranks, str group_name, int serial) -> "
        "Tensor",
        monitored_barrier,
        lambda timeout_s, wait_all_ranks, group_name, serial: _token("cpu"),
    ),
    (
        "wait_tensor(Tensor token, int serial) -> Tensor",
        wait_tensor,
        lambda token, serial: _token(token.device),
    ),
)


def _define() -> None:
    for schema, run, fake in _OPS:
        name = schema.partition("(")[0]
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.fx.node.has_side_effect(torch.ops.dynamo_dist.wait_tensor.default)


_define()
