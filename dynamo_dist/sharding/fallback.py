"""Run an operator for which no strategy decides, on gathered tensors if need be.

An error of ours could be answered by gathering too, with right numbers. It would stay hidden then,
and cost a collective and memory on every call; raised, it names what to report and how to go on
without.

An operator's decomposition runs on the DTensors themselves, so that every size in it is global, and
each operator in it has a strategy of its own. What has none, or cannot be decomposed so, runs on
gathered arguments, if its schema can be believed: whole arguments are the same on every rank, and
what it writes to is known. Others, and what draws random numbers, are refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import collectives
from dynamo_dist.sharding.rows import shapes_and_placements, tensor_strategies
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

# In-place operators that give nothing negative: of anything, of nothing negative, and of nothing
# negative with numbers none of which is.
_NEVER_NEGATIVE = frozenset("abs_ square_ exp_ exp2_ sigmoid_ relu_ zero_".split())
_NOT_OF_ITSELF = frozenset(
    "sqrt_ rsqrt_ pow_ reciprocal_ floor_ ceil_ round_ trunc_ log1p_ expm1_ tanh_ erf_".split()
)
_NOT_WITH_SUCH = frozenset("add_ mul_ div_ clamp_ clamp_min_ clamp_max_ fill_".split())


def run(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """``op`` with each DTensor gathered; results are replicated, arguments written to keep their
    layout.

    Raises StrategyError for tensors of two meshes, and for a plain tensor among DTensors.
    """
    mesh = mesh_of(op, args, kwargs)
    everywhere = [Replicate()] * mesh.ndim

    def whole(value: object) -> Any:
        if isinstance(value, DTensor):
            return value.redistribute(placements=everywhere)._local_tensor
        return value

    local_args, local_kwargs = dtensor_dispatch.tree_map(whole, (args, kwargs))
    results = op(*local_args, **local_kwargs)
    written = _write_back(op, args, kwargs, local_args, local_kwargs)

    def wrapped(value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # An operator that writes returns its argument, so the caller has to get its own DTensor
        # back.
        if id(value) in written:
            return written[id(value)]
        meta = dtensor_specs.TensorMeta(value.shape, value.stride(), value.dtype)
        return dtensor_specs.wrap(value, mesh, everywhere, meta)

    return dtensor_dispatch.tree_map(wrapped, results)


def mesh_of(op: dtensor_specs.OpOverload, args: object, kwargs: object) -> DeviceMesh:
    """The mesh of the DTensors among the arguments."""
    tensors = [
        v for v in dtensor_dispatch.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)
    ]
    # Equal meshes are one key: two objects for the same ranks are no conflict.
    meshes = {t.device_mesh: t for t in tensors if isinstance(t, DTensor)}
    if len(meshes) > 1:
        raise StrategyError(
            f"{op} got DTensors of {len(meshes)} meshes: {', '.join(map(str, meshes))}.",
            "Ranks of different meshes hold different parts, and no collective spans them.",
            "Bring them to one mesh first, e.g. distribute_tensor(x.full_tensor(), mesh, "
            "placements).",
        )
    return next(iter(meshes))


def _write_back(
    op: dtensor_specs.OpOverload, args: Any, kwargs: Any, local_args: Any, local_kwargs: Any
) -> dict[int, DTensor]:
    """Give what was written to back to its DTensor; the DTensors by the tensor that was written
    to.
    """
    written = {}
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if at < len(args):
            before, after = args[at], local_args[at]
        else:
            before, after = kwargs.get(argument.name), local_kwargs.get(argument.name)
        before, after = dtensor_dispatch.tree_leaves(before), dtensor_dispatch.tree_leaves(after)
        for target, local in zip(before, after, strict=True):
            if not isinstance(target, DTensor):
                continue
            _check_writable(op, target, local)
            _check_norm(op, target, (args, kwargs))
            # Gathered: what was written lies in the gathered tensor alone. A replicated one was
            # written to itself.
            if target._local_tensor is not local:
                mesh = target.device_mesh
                part = dtensor_specs.relayout(local, mesh, [Replicate()] * mesh.ndim, target._spec)
                target._local_tensor.copy_(part)
            written[id(local)] = target
    return written


def _check_writable(op: dtensor_specs.OpOverload, target: DTensor, local: torch.Tensor) -> None:
    if target.shape != local.shape:
        raise StrategyError(
            f"{op} would change the shape of a DTensor in place, from {tuple(target.shape)} to "
            f"{tuple(local.shape)}, in {target.placements}.",
            "Every rank holds its part of a fixed global shape.",
            "Use the operator that returns a new tensor.",
        )


def _check_norm(op: dtensor_specs.OpOverload, target: DTensor, given: object) -> None:
    """A norm is kept in parts whose powers are summed up: no part can say that it is negative."""
    if not any(dtensor_specs.is_norm(each) for each in target.placements):
        return
    name = op._schema.name.partition("::")[2].removeprefix("_foreach_")
    others = [
        each
        for each in dtensor_dispatch.tree_leaves(given)
        if each is not target and each is not None
    ]
    if name in _NEVER_NEGATIVE | _NOT_OF_ITSELF or (
        name in _NOT_WITH_SUCH and all(_is_not_negative(each) for each in others)
    ):
        return
    raise StrategyError(
        f"{op} would write to a norm that is still pending, in {target.placements}.",
        "What it gives may be negative, which the parts of a norm cannot hold.",
        "Redistribute the norm to Replicate first, or use the operator that returns a new tensor.",
    )


def _is_not_negative(value: object) -> bool:
    if isinstance(value, DTensor):
        return any(dtensor_specs.is_norm(each) for each in value.placements)
    return isinstance(value, (int, float)) and value >= 0


log = logging.getLogger(__name__)

_warned: set[dtensor_specs.OpOverload] = set()
# A ContextVar: a decomposition comes back here through torch's dispatcher, which hands nothing on.
_decomposing: ContextVar[frozenset[dtensor_specs.OpOverload]] = ContextVar(
    "decomposing", default=frozenset()
)

# What takes over another tensor's memory, as no gathered tensor has it. The second is ``x.data =
# y`` from 2.14 on.
_TAKES_MEMORY = frozenset({"aten::set_", "aten::shallow_copy_data_"})


class Decompose(Exception):
    """Raised by a strategy: in this call the operator is to be computed by ``function(*args,
    **kwargs)``.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self.function = function


def instead(
    error: Exception,
    op: dtensor_specs.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """The result of a call for which no strategy decided, which ``error`` says.

    Raises the StrategyError that a strategy raised, and one for a random operator without a
    strategy or an operator of others whose schema nothing checks.
    """
    cause: BaseException | None = error
    # Torch wraps what a strategy raises, once or twice, and chains the original.
    while cause is not None:
        if isinstance(cause, StrategyError):
            raise cause
        if isinstance(cause, Decompose):
            return cause.function(*args, **kwargs)
        cause = cause.__cause__
    if op._schema.name in _TAKES_MEMORY:
        raise error
    # Before any fallback: on gathered arguments each rank would draw its own numbers.
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise random(op, args, kwargs) from error
    # A decomposition gives new tensors, so it cannot stand for an operator that writes or returns a
    # view.
    function = None if writes_or_views(op) else dtensor_dispatch.decomposition(op)
    # Some decompositions come back to the operator, of which gathering is the way out.
    if function is not None and op not in (active := _decomposing.get()):
        token = _decomposing.set(active | {op})
        try:
            with dtensor_dispatch.plain_tensors_are_replicas():
                found = function(*args, **kwargs)
        except (StrategyError, torch.OutOfMemoryError, MemoryError):
            raise  # gathering would take more memory still
        except Exception as failed:  # a decomposition may refuse DTensors in any way
            log.debug("%s is not decomposed: %s", op, failed)
        else:
            if found is not NotImplemented:
                return found
        finally:
            _decomposing.reset(token)
    if not is_known(op):
        raise StrategyError(
            f"{op} has no sharding strategy for {layouts(args, kwargs)}, and it is no operator of "
            "aten, prims or torch.library.custom_op.",
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
    # Operators of others may draw without a tag; then replicas would differ silently.
    before = dtensor_specs.random_states()
    results = run(op, args, kwargs)
    if not dtensor_specs.are_same_states(before, dtensor_specs.random_states()):
        raise random(op, args, kwargs)  # an operator of others without the tag that says so
    return results


def is_known(op: dtensor_specs.OpOverload) -> bool:
    """Return whether the schema of ``op`` is one that torch checks."""
    # On gathered arguments a collective would combine copies of the whole.
    if op.namespace in collectives.NAMESPACES:
        return False  # torch makes one of them with torch.library.custom_op
    return op.namespace in ("aten", "prims") or dtensor_dispatch.is_custom_op(op._schema.name)


def random(op: dtensor_specs.OpOverload, args: object, kwargs: object) -> StrategyError:
    """The error for a random operator that has no strategy."""
    return StrategyError(
        f"{op} draws random numbers and cannot run on {layouts(args, kwargs)}.",
        "Each rank would draw its own: replicas would differ, and a pending sum would be drawn by "
        "none.",
        "Draw on the local tensors (tensor.to_local()), redistribute a pending sum first, or "
        "register a strategy with dynamo_dist.sharding.register_strategy.",
    )


def writes_or_views(op: dtensor_specs.OpOverload) -> bool:
    """Return whether results of ``op`` share memory with its arguments."""
    return any(argument.alias_info is not None for argument in op._schema.arguments)


def layouts(args: object, kwargs: object) -> str:
    """The placements of the DTensors among the arguments, in order."""
    leaves = dtensor_dispatch.tree_leaves((args, kwargs))
    return ", ".join(str(leaf.placements) for leaf in leaves if isinstance(leaf, DTensor))


# What a strategy says when it does not decide, and what sizes that are not known yet make of it.
UNDECIDED = (
    NotImplementedError,
    Decompose,
    StrategyError,
    dtensor_specs.GuardOnDataDependentSymNode,
)


def of_torch(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """``decide`` of torch, whose errors say that it does not know the layout."""

    def undecided(schema: dtensor_specs.OpSchema, error: Exception) -> Exception:
        return NotImplementedError(f"torch's strategy of {schema.op}: {error}")

    return _asked(decide, undecided)


def of_ours(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """``decide`` of ours; raises StrategyError with operator, layouts and strategy where it
    fails.
    """

    def failure(schema: dtensor_specs.OpSchema, error: Exception) -> Exception:
        specs = [each.strategies[0].output_spec for each in tensor_strategies(schema)]
        return StrategyError(
            f"{decide.__module__}.{decide.__qualname__}, which decides for {schema.op}, failed for "
            f"{shapes_and_placements(specs)}: {error!r}.",
            "This is an error in dynamo_dist.",
            "Report it with this message. To go on, redistribute the arguments to Replicate first, "
            "or register a strategy with dynamo_dist.sharding.register_strategy.",
        )

    return _asked(decide, failure)


def _asked(
    decide: dtensor_dispatch.Strategy,
    described: Callable[[dtensor_specs.OpSchema, Exception], Exception],
) -> dtensor_dispatch.Strategy:
    @functools.wraps(decide)
    def asked(schema: dtensor_specs.OpSchema) -> Any:
        try:
            return decide(schema)
        # These are answers, not errors: the layout is decided elsewhere.
        except UNDECIDED:
            raise
        except Exception as error:
            raise described(schema, error) from error

    return asked
