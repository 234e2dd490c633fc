"""What runs where no strategy decides: other operators on the DTensors, or whole tensors.

An operator's decomposition runs on the DTensors themselves, so that every size in it is global, and
each operator in it has a strategy of its own. What has none, or cannot be decomposed so, runs on
gathered arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import _torch, gathered

log = logging.getLogger(__name__)

_warned: set[_torch.OpOverload] = set()
_decomposing: ContextVar[frozenset[_torch.OpOverload]] = ContextVar(
    "decomposing", default=frozenset()
)


class Decompose(Exception):
    """Raised by a strategy: in this call the operator is to be computed by ``function(*args, **kwargs)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.function = function


def instead(
    error: Exception, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call for which no strategy decided, which ``error`` says.

    Raises the StrategyError that a strategy raised, and one for a random operator without a strategy.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StrategyError):
            raise cause
        if isinstance(cause, Decompose):
            return cause.function(*args, **kwargs)
        cause = cause.__cause__
    if torch.Tag.nondeterministic_seeded in op.tags and op._schema.name.endswith("_"):
        return draw_in_place(op, args, kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise StrategyError(
            f"{op} draws random numbers and cannot run on {layouts(args, kwargs)}.",
            "On gathered arguments each rank would draw its own, and replicas would differ.",
            "Redistribute its arguments to Shard or Replicate first, or register a strategy with "
            "dynamo_dist.sharding.register_strategy.",
        ) from error
    function = None if writes_or_views(op) else _torch.decomposition(op)
    # Some decompositions come back to the operator, of which gathering is the way out.
    if function is not None and op not in (active := _decomposing.get()):
        token = _decomposing.set(active | {op})
        try:
            with _torch.plain_tensors_are_replicas():
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
    if op not in _warned:
        _warned.add(op)
        log.warning(
            "%s has no sharding strategy for %s: its arguments are gathered on every rank. "
            "dynamo_dist.sharding.register_strategy gives it one.",
            op,
            layouts(args, kwargs),
        )
    return gathered.run(op, args, kwargs)


def draw_in_place(op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a DTensor with random numbers: each shard draws its own, of a pending sum one summand has them."""
    target = args[0]
    drawn = op(target._local_tensor.clone(), *args[1:], **kwargs)
    finished = [Replicate() if isinstance(p, Partial) else p for p in target.placements]
    part = _torch.relayout(drawn, target.device_mesh, finished, target._spec)
    target._local_tensor.copy_(part)
    return target


def writes_or_views(op: _torch.OpOverload) -> bool:
    """Whether results of ``op`` share memory with its arguments."""
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def layouts(args: Any, kwargs: Any) -> str:
    """The placements of the DTensors among the arguments, in order."""
    leaves = _torch.tree_leaves((args, kwargs))
    return ", ".join(str(leaf.placements) for leaf in leaves if isinstance(leaf, DTensor))
