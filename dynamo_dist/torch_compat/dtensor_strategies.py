"""DTensor's tables of strategies, and numbers and losses on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.parallel.loss as _loss
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat.dtensor_dispatch import (
    Handler,
    Strategy,
    dispatcher,
    propagator,
    tree_map_only,
)
from dynamo_dist.torch_compat.dtensor_specs import own_part_of_index
from dynamo_dist.torch_compat.patching import (
    OwnState,
    Patch,
    RemoveItem,
    SetItem,
    Upstream,
    WrapFunction,
)

enable_loss_ops: Callable[[], None] = vars(_loss)["_enable_custom_loss_ops"]
disable_loss_ops: Callable[[], None] = vars(_loss)["_disable_custom_loss_ops"]


def dtensor_op_handlers() -> dict[Any, Any]:
    """Operators that DTensor's dispatcher hands to a function of its own."""
    return DTensor._op_dispatcher._custom_op_handlers


def integers_in_partials() -> list[Patch]:
    """Have the first rank hold all of the whole numbers that are to be pending as a sum, the others
    zeros.

    Upstream gives each rank a share, which a tensor of whole numbers cuts off. Seen in 2.13 to
    2.15.
    """

    def partition(
        upstream: Callable[..., torch.Tensor],
        self: Partial,
        tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
    ) -> torch.Tensor:
        # Torch divides by the number of ranks here, which is exact enough for fractions.
        if self.reduce_op != "sum" or tensor.is_floating_point() or tensor.is_complex():
            return upstream(self, tensor, mesh, mesh_dim)
        # Index 0 of a dimension with one entry a rank: it falls on the first rank, and outside
        # of all others.
        first = tensor.new_zeros(1, dtype=torch.int64)
        _, elsewhere = own_part_of_index(first, mesh, mesh_dim, [mesh.size(mesh_dim)], 0)
        return tensor.masked_fill(elsewhere.view(()), 0)

    return [WrapFunction(Partial, "_partition_value", partition)]


class _CloneOfParts(torch.autograd.Function):
    """A DTensor whose local tensor is a copy, in the layout of the original."""

    @staticmethod
    def forward(ctx: object, tensor: DTensor) -> DTensor:
        # DTensor's clone() has a strategy that reduces a Partial first; the local tensor's has
        # none.
        return DTensor(tensor._local_tensor.clone(), tensor._spec, requires_grad=False)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def track_symbolic_results() -> list[Patch]:
    """Let a trace know the global sizes and strides of results that are new expressions of symbols.

    Torch derives them with tracing switched off, and a stride that is a product of two symbols, or
    the size of a convolution, has then no way into the graph. Computed again while tracing, from
    what the graph has of each symbol, it has. Seen in 2.13 to 2.15.
    """

    def propagate(upstream: Upstream, self: Any, schema: OpSchema) -> object:
        found = upstream(self, schema)
        mode = get_proxy_mode()
        if mode is None or found is None:
            return found
        sizes: list[object] = [entry.value for entry in mode.tracer.sympy_expr_tracker.values()]
        # A result's size may also come from a global size that no node of the graph computes by
        # itself.
        for spec in (*schema.args_spec, *schema.kwargs_schema.values()):
            sizes += spec.shape if isinstance(spec, DTensorSpec) else ()
        symbols: dict[Any, Any] = {}
        for size in sizes:
            if isinstance(size, torch.SymInt):
                # Of even shards the global size is so many times the symbol.
                times, symbol = size.node.expr.as_coeff_Mul()
                if symbol.is_Symbol:
                    symbols.setdefault(symbol, size if times == 1 else size // int(times))
        if isinstance(found, TensorMeta):
            return _tracked(found, symbols)
        tracked = [meta and _tracked(meta, symbols) for meta in found]
        return tuple(tracked) if isinstance(found, tuple) else tracked

    return [WrapFunction(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)]


def _tracked(meta: TensorMeta, symbols: dict[object, torch.SymInt]) -> TensorMeta:
    def again(value: object) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        # A bare symbol has its node already. With an unknown symbol nothing can be said: torch's
        # value stays.
        if expression.is_Symbol or not expression.free_symbols <= symbols.keys():
            return value
        return sympy_interp(PythonReferenceAnalysis, symbols, expression)

    return TensorMeta(
        torch.Size(map(again, meta.shape)), tuple(map(again, meta.stride)), meta.dtype
    )


class ClearCaches(OwnState):
    """Forget every sharding decision, those of eager's two caches and of global shapes."""

    def apply(self) -> None:
        clear_caches()

    undo = apply


# What was learned of torch's decisions for lists of DTensors; ``lists.py`` fills it.
answers_for_lists: dict[Any, Any] = {}


def clear_caches() -> None:
    """Forget every sharding decision of this process."""
    # Our own answers were learned from the decisions that are dropped here.
    answers_for_lists.clear()
    _clear_sharding_prop_cache()
    propagator()._propagate_tensor_meta_cached.cache_clear()


class _AskedHere(BaseException):
    """Raised by the probe, through torch's handlers of exceptions."""


class ProveAsked:
    """Fails unless torch's propagation of ``op`` reaches ``strategy``, by going through it once."""

    def __init__(self, op: OpOverload, strategy: Strategy) -> None:
        self.op, self.strategy, self.name = op, strategy, str(op)

    def apply(self) -> None:
        tables = propagator()

        def probe(schema: OpSchema) -> Any:
            raise _AskedHere

        # A handler is asked before any strategy: then there is nothing to probe.
        in_place = tables.op_strategy_funcs.get(self.op) is self.strategy
        if in_place and self.op not in dispatcher()._custom_op_handlers:
            tables.op_strategy_funcs[self.op] = probe
            # The probe has no arguments, of which torch would derive the results' shapes first.
            tables._propagate_tensor_meta_non_cached = lambda schema: None
            try:
                tables.propagate_op_sharding_non_cached(OpSchema(self.op, (), {}))
            except _AskedHere:
                return
            except Exception as error:
                raise self._not_asked() from error
            finally:
                del tables._propagate_tensor_meta_non_cached
                tables.op_strategy_funcs[self.op] = self.strategy
        raise self._not_asked()

    def undo(self) -> None:
        pass

    def _not_asked(self) -> StrategyError:
        return StrategyError(
            f"A strategy was registered for {self.op}, but eager would not ask it.",
            "This torch asks another table first.",
            "Report it with the output of: python -m dynamo_dist doctor",
        )


def on_strategy(
    op: OpOverload, strategy: Strategy, info: RuntimeSchemaInfo, keep_handler: bool = False
) -> list[Patch]:
    """Have ``strategy`` decide for ``op``, whatever decided before.

    Torch asks in this order: a handler, a strategy of one mesh dimension, a strategy, a
    decomposition, a rule. All that come before are taken out.
    """
    tables = propagator()
    found: list[Patch] = [
        RemoveItem(tables.op_single_dim_strategy_funcs, op),
        RemoveItem(tables.op_to_schema_info_for_single_dim_strategy, op),
        SetItem(tables.op_strategy_funcs, op, strategy),
        SetItem(tables.op_to_schema_info, op, info),
    ]
    # A handler is asked before any strategy, so it would keep the new strategy from being asked at
    # all.
    if not keep_handler:
        found.insert(0, RemoveItem(dispatcher()._custom_op_handlers, op))
    return found


def on_dispatch(op: OpOverload, handler: Handler) -> list[Patch]:
    """Have ``handler(op, args, kwargs)`` answer every call of ``op`` with a DTensor."""
    return [SetItem(dispatcher()._custom_op_handlers, op, handler)]


def decided_operators() -> list[OpOverload]:
    """List the operators for which torch has a strategy, in its order, and no handler."""
    tables = propagator()
    known = {**tables.op_strategy_funcs, **tables.op_single_dim_strategy_funcs}
    return [op for op in known if op not in dispatcher()._custom_op_handlers]


def upstream_strategy(op: OpOverload) -> Strategy | None:
    """Return torch's strategy for ``op``, or None if it has none; one of a single mesh dimension
    comes first.

    Reductions are of the latter kind from torch 2.14 on.
    """
    of_one_dimension = propagator().op_single_dim_strategy_funcs.get(op)
    if of_one_dimension is None:
        return propagator().op_strategy_funcs.get(op)

    def decide(schema: OpSchema) -> Any:
        args, kwargs = tree_map_only(
            OpStrategy,
            lambda each: each.strategies[0].output_spec,
            (schema.args_schema, schema.kwargs_schema),
        )
        # Without it, an operator that can only be replicated would have a plain result.
        result = propagator()._propagate_tensor_meta_non_cached(OpSchema(op, args, kwargs))
        expanded = _expand_single_dim_strategy_to_mesh(
            schema.get_mesh_from_args(), schema, of_one_dimension, result
        )
        return expanded(schema.op, schema.args_meta, schema.kwargs_meta)

    return decide


def schema_info(op: OpOverload) -> RuntimeSchemaInfo:
    """Every argument that is no tensor is part of the keys of eager's cache.

    Not numbers that are written to a tensor: they change no layout, and complex ones have no hash
    there.
    """
    arguments = op._schema.arguments
    positional = [not a.kwarg_only for a in arguments]
    # Tensors are in the key by their specs. A key that lacks an argument would serve one call
    # another's decision.
    left_out = ("Tensor", "number") if op._schema.is_mutable else ("Tensor",)
    plain = [not any(kind in str(a.type) for kind in left_out) for a in arguments]
    # Torch hashes all positional arguments from this one on.
    first = next(
        (i for i, (p, q) in enumerate(zip(positional, plain, strict=True)) if p and q),
        len(arguments),
    )
    return RuntimeSchemaInfo(
        static_argnum=first,
        static_kwargkey=[
            a.name for a, q in zip(arguments, plain, strict=True) if a.kwarg_only and q
        ],
        needs_pytree=any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments),
    )


def has_strategy(op: OpOverload) -> bool:
    """Return whether torch decides for ``op`` by a strategy or a rule, not by its decomposition."""
    tables = propagator()
    known = (tables.op_strategy_funcs, tables.op_single_dim_strategy_funcs, tables.op_to_rules)
    return op is torch.ops.aten._local_scalar_dense.default or any(op in each for each in known)


def on_failed_propagation(answer: Callable[..., object]) -> list[Patch]:
    """Ask ``answer(error, op, args, kwargs)`` when no strategy gives a decision.

    What it returns is the result of the call. Torch's dispatcher takes a result that is no sharding
    decision for the result of the operator, as it does for operators that it decomposes.

    For an operator without a strategy torch derives one from its decomposition, and then runs the
    operator itself on the local tensors, where a mean or a gradient divides by the local number of
    elements. So torch is not asked.
    """

    def propagate(
        upstream: Upstream,
        self: object,
        op: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *rest: object,
    ) -> object:
        try:
            if not has_strategy(op):
                # A CompositeImplicit operator, here in inference mode alone: autograd takes it
                # apart before, and its parts are dispatched, each with a strategy of its own.
                if op._can_decompose():
                    return op.decompose(*args, **kwargs)
                # As torch refuses it, and answered below like its refusals.
                raise NotImplementedError(f"{op} does not have a sharding strategy registered.")
            return upstream(self, op, args, kwargs, *rest)
        # Torch's propagation wraps whatever a strategy raises in one of the two; the cause is
        # chained.
        except (NotImplementedError, RuntimeError) as error:
            return answer(error, op, args, kwargs)

    return [WrapFunction(OpDispatcher, "_propagate_op_sharding_dispatch_slow_path", propagate)]
