"""Ways to run an operator for which no strategy decides: other operators on the DTensors, or whole tensors.

An operator's decomposition runs on the DTensors themselves, so that every size in it is global, and
each operator in it has a strategy of its own. What has none, or cannot be decomposed so, runs on
gathered arguments, if its schema can be believed: whole arguments are the same on every rank, and what
it writes to is known. Others, and what draws random numbers, are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import collectives, gathered
from dynamo_dist.torch_compat import aot_gradients, dtensor_dispatch, dtensor_specs

log = logging.getLogger(__name__)

_warned: set[dtensor_specs.OpOverload] = set()
_decomposing: ContextVar[frozenset[dtensor_specs.OpOverload]] = ContextVar(
    "decomposing", default=frozenset()
)

# What takes over another tensor's memory, as no gathered tensor has it. The second is ``x.data = y`` from 2.14 on.
_TAKES_MEMORY = frozenset({"aten::set_", "aten::shallow_copy_data_"})


class Decompose(Exception):
    """Raised by a strategy: in this call the operator is to be computed by ``function(*args, **kwargs)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.function = function


def instead(
    error: Exception, op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call for which no strategy decided, which ``error`` says.

    Raises the StrategyError that a strategy raised, and one for a random operator without a strategy or
    an operator of others whose schema nothing checks.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StrategyError):
            raise cause
        if isinstance(cause, Decompose):
            return cause.function(*args, **kwargs)
        cause = cause.__cause__
    if op._schema.name in _TAKES_MEMORY:
        raise error
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise random(op, args, kwargs) from error
    function = None if writes_or_views(op) else dtensor_dispatch.decomposition(op)
    # Some decompositions come back to the operator, of which gathering is the way out.
    if function is not None and op not in (active := _decomposing.get()):
        token = _decomposing.set(active | {op})
        try:
            with aot_gradients.plain_tensors_are_replicas():
                found = function(*args, **kwargs)
        except StrategyError:
            raise
        except Exception as failed:
            log.debug("%s is not decomposed: %s", op, failed)
        else:
            if found is not NotImplemented:
                return found
        finally:
            _decomposing.reset(token)
    if not is_known(op):
        raise StrategyError(
            f"{op} has no sharding strategy for {layouts(args, kwargs)}, and it is no operator of aten, "
            "prims or torch.library.custom_op.",
            "Nothing checks what its schema says of the arguments that it writes to, or that it "
            "computes the same on every rank's copy of gathered arguments.",
            "Give it local tensors (tensor.to_local(), tensor.full_tensor()), make it with "
            "torch.library.custom_op, or register a strategy with "
            "dynamo_dist.sharding.register_strategy.",
        ) from error
    if op not in _warned:
        _warned.add(op)
        log.warning(
            "%s has no sharding strategy for %s: its arguments are gathered on every rank. "
            "dynamo_dist.sharding.register_rows gives it one.",
            op,
            layouts(args, kwargs),
        )
    before = dtensor_specs.random_states()
    results = gathered.run(op, args, kwargs)
    if not dtensor_specs.are_same_states(before, dtensor_specs.random_states()):
        raise random(op, args, kwargs)  # an operator of others without the tag that says so
    return results


def is_known(op: dtensor_specs.OpOverload) -> bool:
    """Return whether the schema of ``op`` is one that torch checks."""
    if op.namespace in collectives.NAMESPACES:
        return False  # torch makes one of them with torch.library.custom_op
    return op.namespace in ("aten", "prims") or dtensor_dispatch.is_custom_op(op._schema.name)


def random(op: dtensor_specs.OpOverload, args: Any, kwargs: Any) -> StrategyError:
    """The error for a random operator that has no strategy."""
    return StrategyError(
        f"{op} draws random numbers and cannot run on {layouts(args, kwargs)}.",
        "Each rank would draw its own: replicas would differ, and a pending sum would be drawn by none.",
        "Draw on the local tensors (tensor.to_local()), redistribute a pending sum first, or register "
        "a strategy with dynamo_dist.sharding.register_strategy.",
    )


def writes_or_views(op: dtensor_specs.OpOverload) -> bool:
    """Return whether results of ``op`` share memory with its arguments."""
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def layouts(args: Any, kwargs: Any) -> str:
    """The placements of the DTensors among the arguments, in order."""
    leaves = dtensor_dispatch.tree_leaves((args, kwargs))
    return ", ".join(str(leaf.placements) for leaf in leaves if isinstance(leaf, DTensor))
