"""Private torch names of DTensor's dispatcher and strategy tables, seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch._functorch._aot_autograd.graph_capture_wrappers as _graph_capture_wrappers
import torch.autograd.graph as _autograd_graph
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, _resolve_process_group
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._ops import OpOverload as OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed import get_process_group_ranks
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    _dispatch,
    _redistribute,
    _sharding_prop,
)
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._op_schema import OpSchema as OpSchema
from torch.distributed.tensor._op_schema import OpSpec as OpSpec
from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo as RuntimeSchemaInfo
from torch.distributed.tensor._op_schema import TupleStrategy as TupleStrategy
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from dynamo_dist._torch import Change as Change
from dynamo_dist._torch import Made, SetItem, WrapAttribute
from dynamo_dist._torch import SetAttribute as SetAttribute
from dynamo_dist.errors import StrategyError

try:
    from torch.distributed.tensor.experimental._context_parallel import (
        _attention as _context_parallel,
    )
except ImportError:
    _context_parallel = None  # type: ignore[assignment]

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only

# An OpStrategy, or a TupleStrategy for operators on lists.
Strategy = Callable[[OpSchema], Any]
Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def redistribute_costs(source: OpStrategy, target: DTensorSpec) -> list[float]:
    """Return the costs of bringing an input from where it is to ``target``."""
    return generate_redistribute_costs(source, target)


def dispatcher() -> Any:
    """The one ``OpDispatcher`` of the process."""
    return DTensor._op_dispatcher


def propagator() -> Any:
    """The one ``ShardingPropagator`` of the process."""
    return dispatcher().sharding_propagator


def spec(mesh: DeviceMesh, placements: Sequence[Placement], meta: Any = None) -> DTensorSpec:
    """A layout; ``meta`` is the global TensorMeta or None."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def mask_partial(shape: Sequence[int], dim: int) -> _MaskPartial:
    """Pending as a sum in which each rank has zeros for indices that fall outside its part of ``dim``."""
    # Hashed with the placement: symbolic sizes cannot be.
    return _MaskPartial(offset_shape=torch.Size(int(size) for size in shape), offset_dim=dim)


def is_masked(placement: Placement) -> bool:
    """Return whether it is a placement of ``mask_partial``."""
    return isinstance(placement, _MaskPartial)


def is_norm(placement: Placement) -> bool:
    """Return whether parts of a norm are pending there."""
    return isinstance(placement, _NormPartial)


def own_part_of_index(
    index: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[int], dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index into ``dim`` of a whole as one into this rank's part, and where it falls outside of that."""
    mask = mask_partial([1] * dim + [shape[dim]], dim)
    own = mask._partition_value(index, mesh, mesh_dim)
    outside = mask.mask_buffer.data
    assert outside is not None
    return own, outside


def wrap(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], meta: Any) -> Any:
    """A DTensor below autograd, from its local tensor and the global shape, strides and dtype."""
    return DTensor(local, spec(mesh, placements, meta), requires_grad=local.requires_grad)


def wrap_all(local: Sequence[torch.Tensor], specs: Sequence[DTensorSpec]) -> Any:
    """Wrap an operator's local results as torch does."""
    return dispatcher().wrap(local, specs)


def is_here(mesh: DeviceMesh) -> bool:
    """Return whether this rank is one of the mesh's."""
    return mesh.get_coordinate() is not None


def is_observed() -> bool:
    """Return whether somebody traces, or looks at what is dispatched."""
    return torch._C._len_torch_dispatch_stack() > 0


def relayout(
    local: torch.Tensor, mesh: DeviceMesh, source: Sequence[Placement], target: DTensorSpec
) -> torch.Tensor:
    """The local tensor of a whole in other placements; to a pending sum too."""
    return redistribute_local_tensor(local, spec(mesh, source, target.tensor_meta), target)


def adopt(op: OpOverload, args: Any, kwargs: Any, target: DTensor, found: DTensor) -> Any:
    """Make ``target`` what ``found`` is, shape included, for an operator that changes it in place."""
    target._local_tensor, target._spec = found._local_tensor, found._spec
    return return_and_correct_aliasing(op, args, kwargs, target)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two local tensors are in the same memory, under functionalization too."""
    if isinstance(one, LocalTensor) and isinstance(other, LocalTensor):
        rank = min(one._ranks)
        one, other = one._local_tensors[rank], other._local_tensors[rank]
    return bool(StorageWeakRef(one.untyped_storage()) == StorageWeakRef(other.untyped_storage()))


def random_states() -> list[torch.Tensor]:
    """The states of the generators that operators draw from by default; nothing while a program is traced."""
    if detect_fake_mode() is not None or get_proxy_mode() is not None:
        return []
    with _disable_current_modes():
        found = [torch.default_generator.get_state()]
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            found.append(torch.cuda.get_rng_state())
    return found


def are_same_states(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing was drawn in between."""
    with _disable_current_modes():
        return all(map(torch.equal, before, after))


def group_and_reduction(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...] | None, str | None]:
    """The ranks of the group that a collective of c10d is called with, and its reduction's name.

    None for a group that cannot be told, as a name is while another program is traced, and where there
    is no reduction. c10d hands out groups and reductions as script objects.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group: Any = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    elif isinstance(group, str):
        resolve: Callable[[Any], Any] = _resolve_process_group
        group = resolve(group)
    ranks = tuple(get_process_group_ranks(group)) if isinstance(group, ProcessGroup) else None
    reduction: Any = given.get("reduce_op")
    if not isinstance(reduction, str) and reduction is not None:
        reduction = ReduceOp.RedOpType(int(reduction.op())).name.lower()
    return ranks, reduction


@functools.lru_cache(maxsize=256)
def is_beside(mesh: DeviceMesh, ranks: tuple[int, ...]) -> bool:
    """Return whether all ``ranks`` stand at one place of ``mesh``, each in a mesh of its own of one root."""
    with _disable_current_modes():
        root, mine = mesh._get_root_mesh().mesh, mesh.mesh
        places = dict(zip(root.flatten().tolist(), _indices(root), strict=True))
        spanned = [places.get(rank) for rank in mine.flatten().tolist()]
    found = [places.get(rank) for rank in ranks]
    if None in spanned or None in found:
        return False
    across = [dim for dim, at in enumerate(zip(*spanned, strict=True)) if len(set(at)) > 1]
    return all(len({at[dim] for at in found if at is not None}) == 1 for dim in across)


def _indices(tensor: torch.Tensor) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, tensor.shape))


# --- Changes -------------------------------------------------------------------------------------

_MISSING = object()


class RemoveItem(Made):
    """Take one item out of a table, if it is there."""

    def __init__(self, table: MutableMapping[Any, Any], key: object) -> None:
        self.table, self.key, self.of = table, key, key

    def apply(self) -> None:
        self.before = self.table.pop(self.key, _MISSING)

    def undo(self) -> None:
        if self.before is not _MISSING:
            self.table[self.key] = self.before


class ClearCaches:
    """Forget every sharding decision, those of eager's two caches and of global shapes."""

    def apply(self) -> None:
        clear_caches()

    def undo(self) -> None:
        clear_caches()


# What was learned of torch's decisions for lists of DTensors; ``local_lists.py`` fills it.
answers_for_lists: dict[Any, Any] = {}


def clear_caches() -> None:
    """Forget every sharding decision of this process."""
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


def adjusts_shapes(op: OpOverload) -> bool:
    """Return whether torch rewrites arguments of ``op`` that are global shapes, so that local ones differ."""
    return op in propagator().op_to_shape_and_stride_idx


def shapes_of_results(
    schema: OpSchema, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Shapes that the operator gives for tensor arguments of these shapes; None if that cannot be told."""
    left = iter(shapes)

    def fake(value: Any) -> Any:
        if isinstance(value, OpStrategy):
            meta = value.strategies[0].output_spec.tensor_meta
            assert meta is not None
            return torch.empty(next(left), dtype=meta.dtype)
        if isinstance(value, TupleStrategy):
            return [fake(child) for child in value.children]
        return [fake(child) for child in value] if isinstance(value, (list, tuple)) else value

    with maybe_disable_local_tensor_mode(), detect_fake_mode() or FakeTensorMode():
        args = [fake(value) for value in schema.args_schema]
        kwargs = {name: fake(value) for name, value in schema.kwargs_schema.items()}
        try:
            results = schema.op(*args, **kwargs)
        except Exception:
            return None
    return [tuple(r.shape) for r in tree_leaves(results) if isinstance(r, torch.Tensor)]


def on_strategy(
    op: OpOverload, strategy: Strategy, info: RuntimeSchemaInfo, keep_handler: bool = False
) -> list[Change]:
    """Have ``strategy`` decide for ``op``, whatever decided before.

    Torch asks in this order: a handler, a strategy of one mesh dimension, a strategy, a decomposition,
    a rule. All that come before are taken out.
    """
    tables = propagator()
    found: list[Change] = [
        RemoveItem(tables.op_single_dim_strategy_funcs, op),
        RemoveItem(tables.op_to_schema_info_for_single_dim_strategy, op),
        SetItem(tables.op_strategy_funcs, op, strategy),
        SetItem(tables.op_to_schema_info, op, info),
    ]
    if not keep_handler:
        found.insert(0, RemoveItem(dispatcher()._custom_op_handlers, op))
    return found


def on_dispatch(op: OpOverload, handler: Handler) -> list[Change]:
    """Have ``handler(op, args, kwargs)`` answer every call of ``op`` with a DTensor."""
    return [SetItem(dispatcher()._custom_op_handlers, op, handler)]


def as_stock(
    op: OpOverload, handler: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call as it would be answered if ``handler``, which makes it, or one around it were not there."""
    handlers = dispatcher()._custom_op_handlers
    found = handlers.pop(op, handler)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = found


def on_clipping(clip: Callable[..., None]) -> list[Change]:
    """Have ``clip(stock, parameters, max_norm, total_norm, foreach)`` scale gradients to a norm.

    Torch's function for it has this name in 2.11 to 2.15.
    """

    def clipping(stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def scale(
            parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
        ) -> None:
            clip(stock, parameters, max_norm, total_norm, foreach)

        return scale

    return [WrapAttribute(clip_grad, "_clip_grads_with_norm_", clipping)]


def decided_operators() -> list[OpOverload]:
    """List the operators for which torch has a strategy, in its order, and no handler."""
    tables = propagator()
    known = {**tables.op_strategy_funcs, **tables.op_single_dim_strategy_funcs}
    return [op for op in known if op not in dispatcher()._custom_op_handlers]


def stock_strategy(op: OpOverload) -> Strategy | None:
    """Return torch's strategy for ``op``, or None if it has none; one of a single mesh dimension comes first.

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


def is_decided(op: OpOverload) -> bool:
    """Return whether torch has a strategy or a rule for ``op``."""
    tables = propagator()
    return any(
        op in table
        for table in (
            tables.op_strategy_funcs,
            tables.op_single_dim_strategy_funcs,
            tables.op_to_rules,
        )
    )


def schema_info(op: OpOverload) -> RuntimeSchemaInfo:
    """Every argument that is no tensor is part of the keys of eager's cache.

    Not numbers that are written to a tensor: they change no layout, and complex ones have no hash there.
    """
    arguments = op._schema.arguments
    positional = [not a.kwarg_only for a in arguments]
    left_out = ("Tensor", "number") if op._schema.is_mutable else ("Tensor",)
    plain = [not any(kind in str(a.type) for kind in left_out) for a in arguments]
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


def on_failed_propagation(answer: Callable[..., Any]) -> list[Change]:
    """Ask ``answer(error, op, args, kwargs)`` when no strategy gives a decision.

    What it returns is the result of the call. Torch's dispatcher takes a result that is no sharding
    decision for the result of the operator, as it does for operators that it decomposes.
    """
    stock = OpDispatcher._propagate_op_sharding_dispatch_slow_path

    @functools.wraps(stock)
    def propagate(
        self: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any
    ) -> Any:
        try:
            found = stock(self, op, args, kwargs, *rest)
        except (NotImplementedError, RuntimeError) as error:
            return answer(error, op, args, kwargs)
        if moves_what_is_written(op, args, found):
            return answer(NotImplementedError(f"{op} would write to a copy"), op, args, kwargs)
        return found

    return [SetAttribute(OpDispatcher, stock.__name__, propagate)]


def moves_what_is_written(op: OpOverload, args: Sequence[Any], found: object) -> bool:
    """Return whether a decision has the operator write to a redistributed copy of an argument.

    Up to 2.11 that is a decision like others: the copy is dropped for lists, and refused after the fact else.
    """
    if not isinstance(found, OutputSharding) or found.redistribute_schema is None:
        return False
    if not op._schema.is_mutable:
        return False
    wanted = found.redistribute_schema.args_schema
    written = [
        at
        for at, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(
        now._spec.placements != then.placements
        for at in written
        if at < len(args) and at < len(wanted)
        for now, then in zip(
            [each for each in tree_leaves(args[at]) if isinstance(each, DTensor)],
            [each for each in tree_leaves(wanted[at]) if isinstance(each, DTensorSpec)],
            strict=False,
        )
    )


def only_reachable_strategies(
    is_reachable: Callable[[Sequence[Placement], Sequence[Placement]], bool],
) -> list[Change]:
    """Have torch choose a strategy whose layouts it can bring the arguments to, if there is one.

    It prices what it cannot do as any other, and fails later. With none left, no strategy decides.
    """
    stock = _sharding_prop._select_min_cost_strategy

    def reachable(each: OpSpec, schema: OpSchema) -> bool:
        return all(
            is_reachable(
                now.placements, (each.input_specs or [each.output_spec] * (at + 1))[at].placements
            )
            for at, now in enumerate(schema.args_spec)
        )

    @functools.wraps(stock)
    def select(strategy: OpStrategy, schema: OpSchema | None = None) -> OpSpec:
        chosen = stock(strategy, schema)
        if schema is None or reachable(chosen, schema):
            return chosen
        kept = [each for each in strategy.strategies if reachable(each, schema)]
        if not kept:
            raise NotImplementedError(f"{schema.op}: torch cannot redistribute to what it needs")
        return stock(OpStrategy(kept), schema)

    return [SetAttribute(_sharding_prop, stock.__name__, select)]


def without_derived_strategies() -> list[Change]:
    """Have no strategy derived from an operator's decomposition, but for random operators.

    Torch derives the placements from the decomposition and then runs the operator itself on the local
    tensors, where a mean or a gradient divides by the local number of elements.
    """

    def has_decomposition(op: OpOverload) -> bool:
        draws = torch.Tag.nondeterministic_seeded in op.tags
        return draws and not op._schema.is_mutable and stock(op)

    stock = DecompShardingStrategy.has_decomp
    return [SetAttribute(DecompShardingStrategy, "has_decomp", staticmethod(has_decomposition))]


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Return torch's computation of ``op`` by other operators, or None."""
    if op in decomposition_table:
        return decomposition_table[op]
    return op.decompose if op._can_decompose() else None


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
    every rank. Seen in 2.11 to 2.15, where two modules name the engine's entry.
    """
    stock = _autograd_graph._engine_run_backward

    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        symbols = mode is not None and mode.tracer.sympy_expr_tracker
        # No mode where every size is a number: what looks for modes takes another way with any.
        sizes = _ReplicasOfAnySize() if symbols else contextlib.nullcontext()
        with plain_tensors_are_replicas(), sizes:
            return stock(*args, **kwargs)

    return [
        SetAttribute(module, stock.__name__, run)
        for module in (_autograd_graph, torch.autograd)
        if getattr(module, stock.__name__, None) is stock
    ]


def on_writes_to_plain_tensors(write: Callable[..., Any]) -> list[Change]:
    """Have ``write(op, args, kwargs)`` do what writes DTensors to a plain tensor, the first argument.

    Torch computes it, and then does not know what to return. Its C++ looks up once for all time what
    finishes a call, so this stands where a decision is asked for. Seen in 2.11 to 2.15.
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


def in_context_parallel(
    handlers: dict[OpOverload, Handler], output: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Change]:
    """Have these answer calls inside ``context_parallel``, and ``output`` wrap what takes its results apart.

    Inside it torch's dispatcher has a table of handlers made of two others, of which this changes the one
    for attention. A torch without these names has no context parallelism that we know of; seen in 2.11 to
    2.15.
    """
    table = getattr(_context_parallel, "custom_ops", None)
    style = getattr(_context_parallel, "_ContextParallel", None)
    if table is None or style is None:
        return []
    return [
        *(SetItem(table, op, handler) for op, handler in handlers.items()),
        WrapAttribute(style, "sdpa_output_fn", output),
    ]


def resolved_before_collectives() -> list[Change]:
    """Have a conjugation or negation that is only noted on a local tensor done before it is sent.

    Products, copies and views take such tensors as they are, and c10d then refuses them. Seen in 2.11
    to 2.15.
    """

    def resolving(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(stock)
        def redistribute(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Asked first: an exported program would name both, whether there is something to do or not.
            if local.is_conj() or local.is_neg():
                local = local.resolve_conj().resolve_neg()
            return stock(local, *args, **kwargs)

        return redistribute

    return [
        WrapAttribute(module, "redistribute_local_tensor", resolving)
        for module in (_redistribute, _dispatch)
    ]


def whole_numbers_in_parts() -> list[Change]:
    """Have the first rank hold all of the whole numbers that are to be pending as a sum, the others zeros.

    Stock gives each rank a share, which a tensor of whole numbers cuts off. Seen in 2.11 to 2.15.
    """

    def of_whole_numbers(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(stock)
        def partition(
            self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int
        ) -> torch.Tensor:
            if self.reduce_op != "sum" or tensor.is_floating_point() or tensor.is_complex():
                return stock(self, tensor, mesh, mesh_dim)
            first = tensor.new_zeros(1, dtype=torch.int64)
            _, elsewhere = own_part_of_index(first, mesh, mesh_dim, [mesh.size(mesh_dim)], 0)
            return tensor.masked_fill(elsewhere.view(()), 0)

        return partition

    return [WrapAttribute(Partial, "_partition_value", of_whole_numbers)]


class _CloneOfParts(torch.autograd.Function):
    """A DTensor whose local tensor is a copy, in the layout of the original."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return DTensor(tensor._local_tensor.clone(), tensor._spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def pending_inputs_stay_pending() -> list[Change]:
    """Have AOTAutograd copy the parts of an input that a program to be trained changes in place.

    Its own ``clone()`` ends what is pending, as it does for users, and the graph then takes the whole for the
    parts that it said it would return. Seen in 2.11 to 2.15.
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


def masks_per_trace() -> list[Change]:
    """Let each trace, and eager mode, have its own mask of what a row-sharded embedding looked up.

    The mask stands in a placement that the cache of sharding decisions hands out again, until the result
    is reduced. A result that never was left its mask to the next trace, which compared it with its own and
    stopped. Eager mode's waits aside meanwhile. Seen in 2.11 to 2.15.
    """
    materialize, release = MaskBuffer.materialize_mask, MaskBuffer.release_mask

    @functools.wraps(materialize)
    def materializing(self: Any, mask: torch.Tensor) -> None:
        trace, before = _this_trace(), getattr(self, "trace", None)
        if self.refcount and trace != before:
            if before is None:
                self.eager = self.data, self.refcount
            self.data, self.refcount = None, 0
            if trace is None:
                _give_back(self)
        self.trace = trace
        materialize(self, mask)

    @functools.wraps(release)
    def releasing(self: Any) -> None:
        release(self)
        if not self.refcount:
            _give_back(self)

    return [
        SetAttribute(MaskBuffer, materialize.__name__, materializing),
        SetAttribute(MaskBuffer, release.__name__, releasing),
    ]


def _give_back(buffer: Any) -> None:
    buffer.data, buffer.refcount = vars(buffer).pop("eager", (None, 0))
    buffer.trace = None


def _this_trace() -> int | None:
    """Return a number that tells one look at a program from another; None in eager mode."""
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    mode = functional or detect_fake_mode()
    return None if mode is None else id(mode)


def overloads(name: str) -> Iterator[OpOverload]:
    """The overload ``aten.max.dim``, or nothing if this torch lacks it."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is not None and overload in found.overloads():
        yield getattr(found, overload)


def track_symbolic_results() -> list[Change]:
    """Let a trace know the global sizes and strides of results that are new expressions of symbols.

    Torch derives them with tracing switched off, and a stride that is a product of two symbols, or the
    size of a convolution, has then no way into the graph. Computed again while tracing, from what the
    graph has of each symbol, it has. Seen in 2.13 to 2.15.
    """
    stock = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(stock)
    def propagate(self: Any, schema: OpSchema) -> Any:
        found = stock(self, schema)
        mode = get_proxy_mode()
        if mode is None or found is None:
            return found
        sizes: list[Any] = [entry.value for entry in mode.tracer.sympy_expr_tracker.values()]
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

    return [SetAttribute(ShardingPropagator, stock.__name__, propagate)]


def _tracked(meta: TensorMeta, symbols: dict[Any, torch.SymInt]) -> TensorMeta:
    def again(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_Symbol or not expression.free_symbols <= symbols.keys():
            return value
        return sympy_interp(PythonReferenceAnalysis, symbols, expression)

    return TensorMeta(
        torch.Size(map(again, meta.shape)), tuple(map(again, meta.stride)), meta.dtype
    )
