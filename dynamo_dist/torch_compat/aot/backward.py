"""Plain tensors among DTensors in a backward, and pending sums that it reads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch._aot_autograd.graph_capture_wrappers as _graph_capture_wrappers
import torch.autograd.graph as _autograd_graph
from torch._ops import OpOverload
from torch.distributed import is_initialized
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._op_schema import OutputSharding
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute
from dynamo_dist.torch_compat.dtensor.calls import dispatcher, tree_leaves, tree_map_only
from dynamo_dist.torch_compat.dtensor.numbers import _CloneOfParts


@contextlib.contextmanager
def plain_tensors_are_replicas() -> Iterator[None]:
    """Inside, a plain tensor among DTensors stands for itself on every rank."""
    before = dispatcher()._allow_implicit_replication
    dispatcher()._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher()._allow_implicit_replication = before


class _ReplicasOfAnySize(TorchDispatchMode):
    """Plain tensors among DTensors become replicas here: torch's C++ asks for their sizes as numbers.

    Seen in 2.13 to 2.15, where the backward of a split of which one part was used fails with dynamic sizes.
    """

    # Else torch refuses those under any mode, whatever they are called with.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if not isinstance(func, OpOverload):  # It calls operators itself, and may take functions.
            return func(*given[0], **given[1])
        meshes = [each.device_mesh for each in tree_leaves(given) if isinstance(each, DTensor)]

        def replica(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, DTensor) or isinstance(value.numel(), int):
                return value
            placements = [Replicate()] * meshes[0].ndim
            return DTensor.from_local(value, meshes[0], placements, run_check=False)

        # What has a handler of its own, as the losses of loss_parallel, takes plain tensors as they are.
        if meshes and func not in dispatcher()._custom_op_handlers:
            given = tree_map_only(torch.Tensor, replica, given)
        return func(*given[0], **given[1])


def replicas_in_backward() -> list[Change]:
    """Let autograd's own formulas mix tensors that they make with the DTensors they are given.

    Formulas such as that of ``cummax`` start from zeros of the global shape, which are the same on
    every rank. Seen in 2.13 to 2.15, where two modules name the engine's entry.
    """
    stock = _autograd_graph._engine_run_backward

    # Every backward of every program passes here: without a group there is no mesh, and so no DTensor.
    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_initialized():
            return stock(*args, **kwargs)
        mode = get_proxy_mode()
        dispatching = dispatcher()
        before = dispatching._allow_implicit_replication
        dispatching._allow_implicit_replication = True
        try:
            # No mode where every size is a number: what looks for modes takes another way with any.
            if mode is None or not mode.tracer.sympy_expr_tracker:
                return stock(*args, **kwargs)
            with _ReplicasOfAnySize():
                return stock(*args, **kwargs)
        finally:
            dispatching._allow_implicit_replication = before

    return [
        SetAttribute(module, stock.__name__, run)
        for module in (_autograd_graph, torch.autograd)
        if getattr(module, stock.__name__, None) is stock
    ]


def on_writes_to_plain_tensors(write: Callable[..., Any]) -> list[Change]:
    """Have ``write(op, args, kwargs)`` do what writes DTensors to a plain tensor, the first argument.

    Torch computes it, and then does not know what to return. Its C++ looks up once for all time what
    finishes a call, so this stands where a decision is asked for. Seen in 2.13 to 2.15.
    """

    def writing(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def propagate(
            self: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any
        ) -> Any:
            found = stock(
                self, op, args, kwargs, *rest
            )  # refuses plain tensors where they may not stand
            plain = args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor)
            if (
                not plain
                or not op._schema.name.endswith("_")
                or not isinstance(found, OutputSharding)
            ):
                return found
            write(op, args, kwargs)
            return args[0]

        return propagate

    name = "_propagate_op_sharding_dispatch_slow_path"
    return [WrapAttribute(OpDispatcher, name, writing)]


def pending_inputs_stay_pending() -> list[Change]:
    """Have AOTAutograd copy the parts of an input that a program to be trained changes in place.

    Its own ``clone()`` ends what is pending, as it does for users, and the graph then takes the whole for the
    parts that it said it would return. Seen in 2.13 to 2.15.
    """

    def keeping(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def fresh(index: int, tensor: Any, meta: Any) -> Any:
            known = meta.input_info[index] if index in meta.mutated_inp_runtime_indices else None
            if (
                known is not None
                and known.requires_grad
                and known.mutates_data
                and isinstance(tensor, DTensor)
                and any(isinstance(each, Partial) for each in tensor.placements)
            ):
                return _CloneOfParts.apply(tensor)
            return stock(index, tensor, meta)

        return fresh

    return [WrapAttribute(_graph_capture_wrappers, "maybe_to_fresh_input", keeping)]
