"""The functions of torch.distributed and what each is lowered to, and the patches for this.

Sends and receives are lowered here, in program order; collectives in modules of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import (
    aot_partition,
    aot_tracing,
    c10d,
    dynamo_building,
    dynamo_calls,
    dynamo_guards,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import (
    collectives,
    functional,
    nn_functional,
    operators,
    work,
)
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


# c10d's name -> ours, with the same parameters. Names that a torch lacks are left out.
C10D: Mapping[str, Callable[..., Any]] = {
    "all_reduce": collectives.all_reduce,
    "all_reduce_coalesced": collectives.all_reduce_coalesced,
    "reduce": collectives.reduce,
    "reduce_scatter": collectives.reduce_scatter,
    "reduce_scatter_single": collectives.reduce_scatter_tensor,
    "reduce_scatter_tensor": collectives.reduce_scatter_tensor,
    "_reduce_scatter_base": collectives.reduce_scatter_tensor,
    "all_gather": collectives.all_gather,
    "all_gather_single": collectives.all_gather_into_tensor,
    "all_gather_into_tensor": collectives.all_gather_into_tensor,
    "_all_gather_base": collectives.all_gather_into_tensor,
    "all_gather_coalesced": collectives.all_gather_coalesced,
    "gather": collectives.gather,
    "scatter": collectives.scatter,
    "broadcast": collectives.broadcast,
    "all_to_all": collectives.all_to_all,
    "all_to_all_single": collectives.all_to_all_single,
    "isend": isend,
    "irecv": irecv,
    "send": send,
    "recv": recv,
    "batch_isend_irecv": batch_isend_irecv,
    "barrier": collectives.barrier,
    "monitored_barrier": collectives.monitored_barrier,
    "_coalescing_manager": collectives.coalescing_manager,
}

NN_FUNCTIONAL: Mapping[str, Callable[..., Any]] = {
    "broadcast": nn_functional.broadcast,
    "gather": nn_functional.gather,
    "scatter": nn_functional.scatter,
    "reduce": nn_functional.reduce,
    "reduce_scatter": nn_functional.reduce_scatter,
    "all_gather": nn_functional.all_gather,
    "_all_gather_base": nn_functional.all_gather_base,
    "all_to_all": nn_functional.all_to_all,
    "all_to_all_single": nn_functional.all_to_all_single,
    "all_reduce": nn_functional.all_reduce,
}

# Collectives that an open coalescing manager collects -> their kind, and their input and output.
COLLECTED = {
    "all_reduce": ("all_reduce", "tensor", "tensor"),
    "all_gather_single": ("all_gather", "input_tensor", "output_tensor"),
    "all_gather_into_tensor": ("all_gather", "input_tensor", "output_tensor"),
    "_all_gather_base": ("all_gather", "input_tensor", "output_tensor"),
    "reduce_scatter_single": ("reduce_scatter", "input", "output"),
    "reduce_scatter_tensor": ("reduce_scatter", "input", "output"),
    "_reduce_scatter_base": ("reduce_scatter", "input", "output"),
}


def lowered(name: str) -> Callable[..., Any]:
    """An answer to calls of c10d's ``name``: trace ours instead."""
    function = C10D[name]
    signature = inspect.signature(function)

    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None  # upstream raises what eager raises
        # DTensors and tensors in flight have their own meaning here; upstream breaks or decides.
        if any(map(dynamo_calls.is_subclass_instance, bound.values())):
            return None
        # c10d warns and returns on a rank outside of the group; ``recv`` returns -1.
        if name != "_coalescing_manager" and _is_outside(bound.get("group")):
            return dynamo_building.build(tx, -1 if name == "recv" else None)
        if "op" in bound:
            bound["op"] = dynamo_building.build(tx, _reduce_op(name, bound["op"]))
        # The sender's rank is only known when the graph runs, and the program gets it as a number.
        if name == "recv" and "src" not in bound and "group_src" not in bound:
            _refuse_any_source()
        found = work.traced(tx)
        # A Work of an earlier launch can no longer be waited for before the graph.
        found.has_launched = True
        if found.managers and name in COLLECTED:
            calls = found.managers.get(_group_name(bound.get("group")))
            if calls is not None:
                # An open manager launches all of them together where it is closed.
                calls.append((name, bound))
                return dynamo_building.build(tx, None)
        return dynamo_building.call_traced(tx, function, [], dict(bound))

    return answer


def _is_outside(group: Any) -> bool:
    """Return whether the group argument says that this rank is no member; the call then gives
    None.
    """
    if group is None:
        return False
    try:
        return dynamo_building.python_object(group) == dist.GroupMember.NON_GROUP_MEMBER
    except NotImplementedError:
        return False


def _group_name(group: Any) -> str:
    # None stands for the default group, as in c10d.
    value = None if group is None else dynamo_building.python_object(group)
    found: Any = dist.group.WORLD if value is None else value
    return found.group_name


def _reduce_op(function: str, op: Any) -> str:
    """The reduce op's name, guarded."""
    value = dynamo_building.python_object(op)
    name = operators.reduce_op_name(value)
    if name is None:
        dynamo_building.graph_break(
            "Reduce op that cannot be written in a graph",
            f"{function}(op={value!r})",
            "A graph holds the op as text. A premultiplied sum whose factor is a tensor has none.",
            "Multiply first: x.mul_(factor); dist.all_reduce(x)",
        )
    dynamo_guards.guard_source(dynamo_building.realized(op).source, _REDUCE_OP)
    return name


_REDUCE_OP = dynamo_guards.value_guard("reduce op", operators.reduce_op_name, hold=True)


def _refuse_any_source() -> None:
    dynamo_building.graph_break(
        "Receive from any rank that returns the sender",
        "torch.distributed.recv(tensor)",
        "recv without src returns the sender's rank, which is known only when the graph runs.",
        "Name the sender, dist.recv(tensor, src=rank), or use dist.irecv(tensor).wait().",
    )


def _open_manager(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    work.traced(tx).managers[_group_name(args[0])] = []
    return dynamo_building.build(tx, None)


def _close_manager(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    group, async_op = args
    calls = work.traced(tx).managers.pop(_group_name(group))
    if not calls:
        return dynamo_building.build(tx, None)
    kind, input_name, output_name = COLLECTED[calls[0][0]]
    if any(COLLECTED[name][0] != kind for name, _ in calls):
        dynamo_building.graph_break(
            "Collectives of several kinds in one coalescing manager",
            ", ".join(name for name, _ in calls),
            "A coalescing manager makes one launch of what is called inside.",
            "Use one coalescing manager for each kind of collective.",
        )
    pairs = [
        dynamo_building.build_list(tx, [bound[input_name], bound[output_name]])
        for _, bound in calls
    ]
    op = calls[0][1].get("op", dynamo_building.build(tx, "sum"))
    return dynamo_building.call_traced(
        tx,
        collectives.start_together,
        [
            dynamo_building.build(tx, kind),
            dynamo_building.build_list(tx, pairs),
            op,
            group,
            async_op,
        ],
        {},
    )


def _next_serial(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    found = work.traced(tx)
    found.serials += 1
    return dynamo_building.build(tx, found.serials)


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """An answer that calls ``function`` while tracing, on the arguments' objects."""

    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return dynamo_building.build(
            tx, function(*[dynamo_building.python_object(arg) for arg in args])
        )

    return answer


class ReduceOpNames(dynamo_calls.ObjectTracker):
    """The deprecated ``dist.reduce_op``: its members are those of ``ReduceOp``; no warning is
    traced.
    """

    def traced_type(self) -> type:
        return type(dist.reduce_op)

    def attribute(self, tx: Any, name: str) -> Any:
        source = dynamo_building.imported_source(tx, "torch.distributed", "ReduceOp", name)
        return dynamo_building.build(tx, getattr(dist.ReduceOp, name), source)


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply, in order; nothing is applied here."""
    found: list[Patch] = [*work.patches(), *dynamo_calls.allow_point_to_point()]
    for name in C10D:
        if (function := c10d.c10d_function(name)) is not None:
            found += dynamo_trackers.on_function(function, lowered(name))
    for name in collectives.FIXES:
        if (function := c10d.c10d_function(name)) is not None:
            found += dynamo_trackers.on_function(function, collectives.refuse(name))
    for name, ours in NN_FUNCTIONAL.items():
        if (function := c10d.nn_functional_function(name)) is not None:
            found += dynamo_trackers.on_function(function, _traced_instead(ours))
    for name, ours in IN_PLACE_OPS.items():
        found += _on_op(name, _traced_instead(ours))
    return [
        *found,
        *aot_partition.keep_in_its_pass(operators.NAMESPACE),
        *aot_partition.drop_dead_chains(),
        *aot_tracing.pass_context(),
        *aot_tracing.gradients_are_apart(),
        *functional.patches(),
        *_on_op("wait_tensor", work.traced_wait_tensor),
        *dynamo_trackers.on_function(work.start, work.traced_start),
        *dynamo_trackers.on_function(functional.next_serial, _next_serial),
        *(
            patch
            for function in (functional.seconds, functional.barrier_device, functional.coalesces)
            for patch in dynamo_trackers.on_function(function, _constant(function))
        ),
        *dynamo_trackers.on_function(collectives.open_manager, _open_manager),
        *dynamo_trackers.on_function(collectives.close_manager, _close_manager),
        dynamo_trackers.on_object(
            dist.reduce_op, lambda builder, _: ReduceOpNames(source=builder.source)
        ),
    ]


# torch.ops._c10d_functional's ops that write to an argument -> ours.
IN_PLACE_OPS: Mapping[str, Callable[..., Any]] = {
    "all_reduce_": collectives.all_reduce_,
    "all_reduce_coalesced_": collectives.all_reduce_coalesced_,
    "broadcast_": collectives.broadcast_,
    "all_gather_into_tensor_out": collectives.all_gather_into_tensor_out,
    "reduce_scatter_tensor_out": collectives.reduce_scatter_tensor_out,
}


def _on_op(name: str, answer: Callable[..., Any]) -> list[Patch]:
    return [
        patch
        for op in c10d.functional_op(name)
        for patch in dynamo_trackers.on_function(op, answer)
    ]


def _traced_instead(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tx, args, kwargs: dynamo_building.call_traced(tx, function, args, kwargs)
