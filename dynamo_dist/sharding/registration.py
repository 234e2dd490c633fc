"""``register_rows`` and ``register_strategy``, and the checks on what a user's strategy returns."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Shard

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding.rows import (
    Call,
    Row,
    Rows,
    shapes_and_placements,
    strategy,
    tensor_strategies,
)
from dynamo_dist.torch_compat import (
    dtensor_dispatch,
    dtensor_specs,
    dtensor_strategies,
    dynamo_compiler,
    patching,
)
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.plugins import digest_of_sources


def checked(
    op: dtensor_specs.OpOverload, function: dtensor_dispatch.Strategy
) -> dtensor_dispatch.Strategy:
    """``function`` with its results checked; raises StrategyError for what cannot be right."""

    @functools.wraps(function)
    def decide(schema: dtensor_specs.OpSchema) -> Any:
        inputs = [each.strategies[0].output_spec for each in tensor_strategies(schema)]
        try:
            found = function(schema)
        except StrategyError:
            raise
        except Exception as error:
            raise StrategyError(
                f"The strategy of {op} failed for {shapes_and_placements(inputs)}: {error!r}.",
                "It must give an OpStrategy for every layout.",
                "Let it offer the spec in which all is replicated where it knows no other.",
            ) from error
        # One strategy for each entry of a list: the schema does not say how many entries there are.
        if isinstance(found, dtensor_specs.TupleStrategy):
            for child in found.children:
                _check_meshes(op, child, inputs)
            return found
        if not isinstance(found, dtensor_specs.OpStrategy) or not found.strategies:
            raise StrategyError(
                f"The strategy of {op} returned {found!r} for {shapes_and_placements(inputs)}.",
                "It must return an OpStrategy with at least one OpSpec, or a TupleStrategy.",
                "Let it always offer the spec in which all is replicated.",
            )
        _check_meshes(op, found, inputs)
        for each in found.strategies:
            _check_numbers(op, each, inputs)
            _check_dims(op, each, inputs)
        _check_shapes(op, schema, found, inputs)
        return found

    return decide


def _check_meshes(op: dtensor_specs.OpOverload, found: Any, inputs: Sequence[Any]) -> None:
    meshes = [spec.mesh for spec in inputs]
    for each in found.strategies:
        for spec in (*_outputs(each), *(each.input_specs or ())):
            if spec is not None and spec.mesh not in meshes:
                raise StrategyError(
                    f"The strategy of {op} returned a spec of mesh {spec.mesh} for "
                    f"{shapes_and_placements(inputs)} on "
                    f"{meshes[0]}.",
                    "A result lives on the mesh of the arguments.",
                    "Make specs with the mesh of the schema's arguments.",
                )


def _check_numbers(op: dtensor_specs.OpOverload, found: Any, inputs: Sequence[Any]) -> None:
    returns = [str(each.type) for each in op._schema.returns]
    outputs = _outputs(found)
    if not any("List" in each for each in returns):
        wanted = sum("Tensor" in each for each in returns)
        if len(outputs) != wanted and not (len(outputs) == 1 and wanted > 1):
            raise StrategyError(
                f"The strategy of {op} returned {len(outputs)} output specs for "
                f"{shapes_and_placements(inputs)}, "
                f"expected {wanted}.",
                f"The operator returns {wanted} tensors.",
                "Give output_specs one entry for each, None for one that is not computed.",
            )
    if found.input_specs is not None and len(found.input_specs) != len(inputs):
        raise StrategyError(
            f"The strategy of {op} returned {len(found.input_specs)} input specs for "
            f"{shapes_and_placements(inputs)}, expected {len(inputs)}.",
            "Each tensor argument has a layout.",
            "Give input_specs one entry for each tensor argument, in order.",
        )


def _check_dims(op: dtensor_specs.OpOverload, found: Any, inputs: Sequence[Any]) -> None:
    for spec, now in zip(found.input_specs or (), inputs, strict=False):
        if len(spec.placements) != spec.mesh.ndim:
            raise StrategyError(
                f"The strategy of {op} returned placements {spec.placements} for "
                f"{shapes_and_placements(inputs)} on a "
                f"mesh of {spec.mesh.ndim} dimensions.",
                "There is one placement for each dimension of the mesh.",
                "Give as many placements as the mesh has dimensions.",
            )
        for placement in spec.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(now.shape):
                raise StrategyError(
                    f"The strategy of {op} shards dimension {placement.dim} of an argument of "
                    f"shape {tuple(now.shape)} for {shapes_and_placements(inputs)}.",
                    "The argument has no such dimension.",
                    "Shard dimensions from 0 on that the argument has.",
                )


def _check_shapes(
    op: dtensor_specs.OpOverload, schema: dtensor_specs.OpSchema, found: Any, inputs: Sequence[Any]
) -> None:
    """On the first and on the last rank, whose parts are the largest and the smallest."""
    if dtensor_dispatch.adjusts_shapes(op) or any(
        not isinstance(size, int) for spec in inputs for size in spec.shape
    ):
        return
    whole = dtensor_dispatch.shapes_of_results(schema, [tuple(spec.shape) for spec in inputs])
    if whole is None:
        return
    # Every other rank's part has the size of one of the two.
    for each, last in itertools.product(found.strategies, (False, True)):
        specs = each.input_specs or [each.output_spec] * len(inputs)
        parts = [_part(now.shape, spec, last) for now, spec in zip(inputs, specs, strict=True)]
        local = dtensor_dispatch.shapes_of_results(schema, parts)
        outputs = _outputs(each)
        if local is None or len(local) != len(outputs) or len(whole) != len(outputs):
            continue
        expected = [
            _part(shape, spec, last) if spec is not None else None
            for shape, spec in zip(whole, outputs, strict=True)
        ]
        if any(e is not None and part != e for e, part in zip(expected, local, strict=True)):
            raise StrategyError(
                f"The strategy of {op} turns {[s.placements for s in specs]} into "
                f"{[o and o.placements for o in outputs]}: local results have shapes {local}, "
                f"expected {expected} of global {whole}.",
                "Placements of the results must say what the local operator computes.",
                "Correct the output specs, or replicate the dimensions that the operator mixes.",
            )


def _part(shape: Sequence[int], spec: Any, last: bool) -> tuple[int, ...]:
    local = list(shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard) and placement.dim < len(local):
            chunk = -(-local[placement.dim] // size)
            start = (size - 1) * chunk if last else 0
            local[placement.dim] = max(min(chunk, local[placement.dim] - start), 0)
    return tuple(local)


def _outputs(found: Any) -> list[Any]:
    specs = found.output_specs
    if specs is None:
        return []
    return list(specs) if isinstance(specs, (list, tuple)) else [specs]


__all__ = ["Call", "Row", "register_rows", "register_strategy"]

registered: dict[
    dtensor_specs.OpOverload, tuple[dtensor_dispatch.Strategy, dtensor_specs.RuntimeSchemaInfo]
] = {}


def register_rows(op: dtensor_specs.OpOverload, rows: Rows, *, any_part: bool = False) -> Rows:
    """Have ``rows(call)`` list how ``op`` runs on one mesh dimension; its strategy is made of that.

    A row is ``call.row([Shard(0)], x=Shard(0))``: the placement of each result, and by name of the
    tensor arguments that are not replicated. Replicas need no row. Every combination of rows over
    the mesh is offered at the price of bringing the arguments to it, which torch and the planner
    compare. An argument is gathered first if a rank would hold no element of it, or if it is in a
    strided shard. With ``any_part`` neither is gathered: the rows hold whichever elements a rank
    has, if it has the same of every argument.

    For an operator on lists of tensors, or one whose local call is another, see
    ``register_strategy``, by whose terms this is in force. Returns ``rows``.
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
    """Have the decorated function decide how ``op`` runs on DTensors, now and after each
    ``enable()``.

    The function takes torch's ``OpSchema`` (global shapes and present layouts) and returns an
    ``OpStrategy``, or a ``TupleStrategy`` for operators on lists of tensors. What it returns is
    checked once for each layout: meshes, numbers of specs, and that the local operator gives
    results of the local shapes that the specs say. The keywords are those of torch's
    ``RuntimeSchemaInfo``; by default every argument that is no tensor is part of the key of eager's
    cache.

    It replaces torch's strategy, the plugin's, and an earlier one for ``op``, and drops cached
    decisions. The sources of the function and of its package are part of the keys of the compile
    caches. Raises StrategyError if ``op`` is no overload, or if eager
    would ask another strategy nevertheless.
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
        # No trace may see the new strategy before caches of the old one's decisions are dropped.
        with dynamo_compiler.compile_lock:
            registered[op] = (checked(op, function), info)
            if patching.is_enabled():
                patching.apply(patches([op]))
        return function

    return register


def patches(ops: Sequence[dtensor_specs.OpOverload] | None = None) -> list[Patch]:
    """List the patches that enabling makes for the registered strategies, of these operators or
    of all.
    """
    found: list[Patch] = [dtensor_strategies.ClearCaches()]
    for op in registered if ops is None else ops:
        function, info = registered[op]
        found += [
            *dtensor_strategies.on_strategy(op, function, info),
            dtensor_strategies.ProveAsked(op, function),
            # Torch's compile caches see the graph, and nothing of the strategies by which it was
            # made.
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
    helpers = digest_of_sources(getattr(function, "__module__", None) or "")  # None: of an exec()
    return hashlib.sha256(f"{op} {source} {helpers}".encode()).hexdigest()[:12]
