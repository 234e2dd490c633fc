"""``register_strategy``: a strategy of the user's own for an operator."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence

from dynamo_dist import _torch as core
from dynamo_dist import activation
from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import _torch, checks

_registered: dict[_torch.OpOverload, tuple[_torch.Strategy, _torch.RuntimeSchemaInfo]] = {}


def register_strategy(
    op: _torch.OpOverload,
    *,
    static_argnum: int | None = None,
    static_kwargkey: Sequence[str] | None = None,
    needs_pytree: bool | None = None,
) -> Callable[[_torch.Strategy], _torch.Strategy]:
    """Have the decorated function decide how ``op`` runs on DTensors, now and after each ``enable()``.

    The function takes torch's ``OpSchema`` (global shapes and present layouts) and returns an
    ``OpStrategy``, or a ``TupleStrategy`` for operators on lists of tensors. What it returns is checked
    once for each layout: meshes, numbers of specs, and that the local operator gives results of the
    local shapes that the specs say. The keywords are those of torch's ``RuntimeSchemaInfo``; by default
    every argument that is no tensor is part of the key of eager's cache.

    It takes the place of torch's strategy, of ours, and of an earlier one for ``op``; cached decisions
    are dropped, and the function's source is part of the keys of the compile caches. Raises
    StrategyError if ``op`` is no overload, or if eager would ask another strategy nevertheless.
    """
    if not isinstance(op, _torch.OpOverload):
        raise StrategyError(
            f"register_strategy needs an overload of an operator, but got {op!r}.",
            "A layout is decided for one signature.",
            "Name the overload, e.g. torch.ops.mylib.scale.default.",
        )

    def register(function: _torch.Strategy) -> _torch.Strategy:
        inferred = _torch.schema_info(op)
        info = _torch.RuntimeSchemaInfo(
            inferred.static_argnum if static_argnum is None else static_argnum,
            inferred.static_kwargkey if static_kwargkey is None else list(static_kwargkey),
            inferred.needs_pytree if needs_pytree is None else needs_pytree,
        )
        with core.compile_lock:
            _registered[op] = (checks.checked(op, function), info)
            if activation.is_enabled():
                activation.apply_also(changes([op]))
        return function

    return register


def changes(ops: Sequence[_torch.OpOverload] | None = None) -> list[_torch.Change]:
    """List the changes that enabling makes for the registered strategies, of these operators or of all."""
    found: list[_torch.Change] = [_torch.ClearCaches()]
    for op in _registered if ops is None else ops:
        function, info = _registered[op]
        found += [
            *_torch.on_strategy(op, function, info),
            _torch.ProveAsked(op, function),
            core.CacheKeyTag(f"-{_digest(op, function)}"),
        ]
    return [*found, _torch.ClearCaches()]


def save() -> Callable[[], None]:
    """Note what is registered now; the function returned goes back to it."""
    before = dict(_registered)

    def restore() -> None:
        _registered.clear()
        _registered.update(before)

    return restore


def _digest(op: _torch.OpOverload, function: _torch.Strategy) -> str:
    function = inspect.unwrap(function)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        # Made by exec or at a prompt: its code is all there is.
        source = repr(getattr(function, "__code__", function))
    return hashlib.sha256(f"{op} {source}".encode()).hexdigest()[:12]
