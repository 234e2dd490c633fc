"""``register_rows`` and ``register_strategy``: a strategy of the user's own for an operator."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence

from dynamo_dist import switch
from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import checks
from dynamo_dist.sharding.rows import Call, Row, Rows, strategy
from dynamo_dist.torch_compat import (
    dtensor_dispatch,
    dtensor_specs,
    dtensor_strategies,
    dynamo_compiler,
)
from dynamo_dist.torch_compat.patching import Change
from inductor_passes.plugins import digest_of_sources

__all__ = ["Call", "Row", "register_rows", "register_strategy"]

registered: dict[
    dtensor_specs.OpOverload, tuple[dtensor_dispatch.Strategy, dtensor_specs.RuntimeSchemaInfo]
] = {}


def register_rows(op: dtensor_specs.OpOverload, rows: Rows, *, any_part: bool = False) -> Rows:
    """Have ``rows(call)`` list how ``op`` runs on one mesh dimension; its strategy is made of that.

    A row is ``call.row([Shard(0)], x=Shard(0))``: the placement of each result, and by name of the tensor
    arguments that are not replicated. Replicas need no row. Every combination of rows over the mesh is
    offered at the price of bringing the arguments to it, which torch and the planner compare. An argument
    of which a rank would hold nothing is gathered first, and one in a strided shard too; with ``any_part``
    neither is: the rows hold whichever elements a rank has, if it has the same of every argument.

    For an operator on lists of tensors, or one whose local call is another, see ``register_strategy``, by
    whose terms this is in force. Returns ``rows``.
    """
    register_strategy(op)(strategy(rows, any_part))
    return rows


def register_strategy(
    op: dtensor_specs.OpOverload,
    *,
    static_argnum: int | None = None,
    static_kwargkey: Sequence[str] | None = None,
    needs_pytree: bool | None = None,
) -> Callable[[dtensor_dispatch.Strategy], dtensor_dispatch.Strategy]:
    """Have the decorated function decide how ``op`` runs on DTensors, now and after each ``enable()``.

    The function takes torch's ``OpSchema`` (global shapes and present layouts) and returns an
    ``OpStrategy``, or a ``TupleStrategy`` for operators on lists of tensors. What it returns is checked
    once for each layout: meshes, numbers of specs, and that the local operator gives results of the
    local shapes that the specs say. The keywords are those of torch's ``RuntimeSchemaInfo``; by default
    every argument that is no tensor is part of the key of eager's cache.

    It takes the place of torch's strategy, of ours, and of an earlier one for ``op``; cached decisions
    are dropped, and the sources of the function and of the package that it is in are part of the keys of
    the compile caches. Raises StrategyError if ``op`` is no overload, or if eager would ask another
    strategy nevertheless.
    """
    if not isinstance(op, dtensor_specs.OpOverload):
        raise StrategyError(
            f"A strategy is registered for an overload of an operator, but got {op!r}.",
            "A layout is decided for one signature.",
            "Name the overload, e.g. torch.ops.mylib.scale.default.",
        )

    def register(function: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
        inferred = dtensor_strategies.schema_info(op)
        info = dtensor_specs.RuntimeSchemaInfo(
            inferred.static_argnum if static_argnum is None else static_argnum,
            inferred.static_kwargkey if static_kwargkey is None else list(static_kwargkey),
            inferred.needs_pytree if needs_pytree is None else needs_pytree,
        )
        with dynamo_compiler.compile_lock:
            registered[op] = (checks.checked(op, function), info)
            if switch.is_enabled():
                switch.apply(changes([op]))
        return function

    return register


def changes(ops: Sequence[dtensor_specs.OpOverload] | None = None) -> list[Change]:
    """List the changes that enabling makes for the registered strategies, of these operators or of all."""
    found: list[Change] = [dtensor_strategies.ClearCaches()]
    for op in registered if ops is None else ops:
        function, info = registered[op]
        found += [
            *dtensor_strategies.on_strategy(op, function, info),
            dtensor_strategies.ProveAsked(op, function),
            dynamo_compiler.CacheKeyTag(f"-{_digest(op, function)}"),
        ]
    return [*found, dtensor_strategies.ClearCaches()]


def digests() -> dict[str, str]:
    """Return registered operators, with what their strategies add to the keys of torch's caches."""
    return {str(op): _digest(op, function) for op, (function, _) in registered.items()}


def _digest(op: dtensor_specs.OpOverload, function: dtensor_dispatch.Strategy) -> str:
    function = inspect.unwrap(function)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        # Made by exec or at a prompt: its code is all there is.
        source = repr(getattr(function, "__code__", function))
    helpers = digest_of_sources(getattr(function, "__module__", ""))
    return hashlib.sha256(f"{op} {source} {helpers}".encode()).hexdigest()[:12]
