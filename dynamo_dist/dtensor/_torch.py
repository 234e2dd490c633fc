"""Private torch names that DTensors need: aliases of inputs, attributes, construction."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.guards as _guards
import torch._dynamo.utils as _dynamo_utils
import torch._dynamo.variables.builder as _builder
import torch._functorch._aot_autograd.collect_metadata_analysis as _collect_metadata
import torch._functorch._aot_autograd.functional_utils as _functional_utils
import torch._functorch._aot_autograd.runtime_wrappers as _runtime_wrappers
import torch._prims_common as _prims_common
import torch.distributed.device_mesh as _device_mesh
import torch.distributed.tensor._dtensor_spec as _dtensor_spec
import torch.distributed.tensor._ops._view_ops as _view_ops
import torch.distributed.tensor._redistribute as _redistribute
import torch.distributed.tensor.parallel.loss as _loss
import torch.distributed.tensor.placement_types as _placement_types
import torch.fx.experimental.proxy_tensor as _proxy_tensor
from torch._C import _functionalization, _get_dispatch_mode
from torch._C import _TorchDispatchModeKey as _ModeKey
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.utils import proxy_args_kwargs as _proxy_args_kwargs
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor, Partial
from torch.fx.experimental.symbolic_shapes import (
    PropagateUnbackedSymInts,
    has_free_unbacked_symbols,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dynamo_dist._torch import Change as Change
from dynamo_dist._torch import SetAttribute, WrapAttribute
from dynamo_dist.errors import StrategyError
from dynamo_dist.trackers._torch import HAS_OPAQUE_TYPES, realized
from dynamo_dist.trackers._torch import build as build
from dynamo_dist.trackers._torch import build_list as build_list
from dynamo_dist.trackers._torch import call_traced as call_traced
from dynamo_dist.trackers._torch import constants as constants
from dynamo_dist.trackers._torch import fake_tensor as fake_tensor
from dynamo_dist.trackers._torch import graph_break as graph_break
from dynamo_dist.trackers._torch import items_of as items_of
from dynamo_dist.trackers._torch import on_function as on_function
from dynamo_dist.trackers._torch import python_object as python_object

tree_leaves = _pytree.tree_leaves
KEPT_OFFSETS = 64
_REFUSES_SYMBOLIC_FACTORS = hasattr(_view_ops, "_explicit_unbacked_hint")  # from 2.13 on
KEPT_REDISTRIBUTIONS = 16_384
TRACES_PLACEMENTS = HAS_OPAQUE_TYPES  # their methods, and graphs hold them; up to 2.11 neither
_partition_value: Any = vars(Partial)["_partition_value"]


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share memory, under functionalization too."""
    return StorageWeakRef(tensor.untyped_storage())


def has_tensors(tree: Any) -> bool:
    """Return whether any leaf is a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(tree))


tree_map = _pytree.tree_map


def can_partition(kind: type) -> bool:
    """Return whether ``partition_value`` traces for a placement of this class, a subclass of the user's too."""
    own: Any = getattr(kind, "_partition_value", None)
    return TRACES_PLACEMENTS or own is None or inspect.unwrap(own) is _partition_value


def partition_value(placement: Any, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> torch.Tensor:
    """Traced: what this rank holds of ``tensor`` as a partial value."""
    if TRACES_PLACEMENTS:
        return placement._partition_value(tensor, mesh, mesh_dim)
    return _partition_value(placement, tensor, mesh, mesh_dim)


def cut_empty_shards() -> list[Change]:
    """Have the shards of ranks for which nothing is left be cut off the tensor, as those of all ranks are.

    Stock makes them of zeros. Inductor then knows on such a rank alone what a launch sends, runs it in
    the forward instead of the backward, or not at all where its result is cut, and the ranks hang. Seen
    in 2.11 to 2.15.
    """

    def fill(shards: list[torch.Tensor], dim: int, missing: int) -> list[torch.Tensor]:
        return [*shards, *[shards[0].narrow(dim, 0, 0).clone()] * missing]

    return [SetAttribute(_placement_types, "fill_empty_tensor_to_shards", fill)]


def on_full_tensor(function: Callable[..., Any]) -> list[Change]:
    """Trace ``function`` for ``full_tensor(grad_placements=...)`` where stock has no method for it, up to 2.11.

    Placements are no values of that stock's graphs.
    """
    if TRACES_PLACEMENTS or hasattr(TensorVariable, "method_full_tensor"):
        return []

    def method_full_tensor(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return call_traced(tx, function, [self, *args], kwargs) if args or kwargs else None

    return [SetAttribute(TensorVariable, "method_full_tensor", method_full_tensor)]


def on_contiguous_strides(function: Callable[..., Any]) -> list[Change]:
    """Trace ``function`` where ``zeros``, ``ones``, ``empty`` and ``full`` lay out a tensor of a given size.

    In torch's own Python for it stands what 2.11 refuses to trace; from 2.12 on it traces.
    """
    found = getattr(_prims_common, "make_contiguous_strides_for", None)
    if found is None or TRACES_PLACEMENTS:
        return []
    return on_function(found, lambda tx, args, kwargs: call_traced(tx, function, args, kwargs))


def overload(name: str, overload: str) -> Any:
    """The operator of a schema's name, such as ``aten::view``."""
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


class _CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def recorded_views(view: torch.Tensor, base: torch.Tensor) -> tuple[Any, list[Any]]:
    """Replay what autograd recorded from ``base`` to ``view``: the result, and the operators' calls."""
    with torch.no_grad(), _CallRecorder() as recorder:
        found = view._view_func_unsafe(base)
    return found, recorder.calls


def local_views(local: torch.Tensor) -> Any:
    """The views by which functionalization reached this tensor, or None; they can be pickled."""
    if not isinstance(local, FunctionalTensor):
        return None
    views = _functionalization.get_view_meta_sequence(local.elem)
    return None if any(view.has_symbolic_inputs for view in views) else views


def apply_local_views(base: torch.Tensor, views: Any) -> torch.Tensor:
    """The same views of another tensor."""
    return _functionalization.apply_view_meta_sequence(base, views)


def on_output_aliases(
    record: Callable[..., Any],
    replay: Callable[..., Any],
    apart: Callable[..., Any],
    cls: type,
) -> list[Change]:
    """Let ``record(args, outputs)`` say how outputs of ``cls`` come from their bases, and ``replay`` do it.

    AOTAutograd runs the program once to see what aliases what; ``record`` gives the outputs to look at
    and for each a way or None. The way stands in ``OutputAliasInfo.view_meta_sequence``, where
    AOTAutograd keeps those of plain tensors, and is given to ``replay(way, base, target,
    requires_grad)`` after each call, one after disable() too.

    It looks again at the program on local tensors, to count what it returns; ``apart(args, outputs)`` are
    the outputs to look at then, since the program returns none of the bases that it would count for aliases
    among them. Seen in torch 2.11 to 2.15.
    """
    stock_collect = _collect_metadata.run_functionalized_fw_and_collect_metadata
    stock_alias = _functional_utils.gen_alias_from_base

    @functools.wraps(stock_collect)
    def collect(f: Any, *args: Any, **kwargs: Any) -> Any:
        ways: list[Any] = []

        @functools.wraps(f)
        def watched(*flat: Any) -> Any:
            if not any(isinstance(arg, cls) for arg in flat):
                return f(*flat)
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                outputs = f(*flat)
            found, ways[:] = record(flat, outputs)
            return type(outputs)(found)

        inner = stock_collect(watched, *args, **kwargs)

        @functools.wraps(inner)
        def run(*flat: Any) -> Any:
            metadata = inner(*flat)
            for i, way in enumerate(ways):
                info = metadata.output_info[i]
                if way is not None and "alias" in info.output_type.name:
                    metadata.output_info[i] = dataclasses.replace(info, view_meta_sequence=way)
            return metadata

        return run

    @functools.wraps(stock_collect)
    def collect_local(f: Any, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(f)
        def watched(*flat: Any) -> Any:
            outputs = f(*flat)
            return type(outputs)(apart(flat, outputs))

        return stock_collect(watched, *args, **kwargs)

    @functools.wraps(stock_alias)
    def alias(
        base: Any, target: Any, requires_grad: bool, way: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(base, cls) and (way is not None or not _same_layout(base, target)):
            return replay(way, base, target, requires_grad)
        return stock_alias(base, target, requires_grad, way, *args, **kwargs)

    @functools.cache
    def keeping(handler: Any) -> Any:
        call = handler.__call__
        if "gen_alias_from_base" not in call.__code__.co_names:
            return handler
        scope = {**call.__globals__, "gen_alias_from_base": alias}
        bound = types.FunctionType(call.__code__, scope, call.__name__, call.__defaults__)
        return type(handler.__name__, (handler,), {"__call__": bound})

    def handlers(stock: Any) -> Any:
        @functools.wraps(stock)
        def make(*args: Any, **kwargs: Any) -> Any:
            handler = stock(*args, **kwargs)
            handler.__class__ = keeping(handler.__class__)
            return handler

        return make

    local_program = _optional_module("torch._functorch._aot_autograd.graph_capture_wrappers")
    places = [
        _collect_metadata,
        _functional_utils,
        _optional_module("torch._functorch.aot_autograd"),
        _optional_module("torch._functorch._aot_autograd.runtime_wrappers"),
        local_program,
        _optional_module("torch._functorch._aot_autograd.standalone_runtime"),  # 2.15
    ]
    found: list[Change] = [
        SetAttribute(place, name, value)
        for place in places
        for name, value in (
            (stock_collect.__name__, collect_local if place is local_program else collect),
            (stock_alias.__name__, alias),
        )
        if name in vars(place or object)
    ]
    # Up to 2.12 these look up at every call what makes an alias.
    return found + [
        WrapAttribute(place, "make_output_handler", handlers)
        for place in places
        if "make_output_handler" in vars(place or object)
    ]


def _same_layout(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# --- DTensor: attributes and construction ----------------------------------------------------------

DTensorSpec: Any = _dtensor_spec.DTensorSpec
TensorMeta: Any = _dtensor_spec.TensorMeta


def current_mesh() -> Any:
    """Traced: the mesh of the innermost ``with mesh:``; RuntimeError outside of any."""
    return _device_mesh._mesh_resources.get_current_mesh()


_ATTRIBUTE_METHODS = ("var_getattr", "tp_getattro_impl")  # the second from 2.14 on


def on_tensor_attributes(
    has_attribute: Callable[[Any, type, str], bool | None],
    attribute: Callable[[Any, Any, str], Any],
) -> list[Change]:
    """``hasattr(tensor, name)`` and ``tensor.name``, where our answer is not None.

    ``has_attribute(tracker, cls, name)`` is given the tensor's class, and ``attribute(tx, tracker, name)``
    gives a tracker.
    """
    stock_hasattr: Any = TensorVariable.call_obj_hasattr
    name = next(name for name in reversed(_ATTRIBUTE_METHODS) if name in vars(TensorVariable))
    stock_getattr = getattr(TensorVariable, name)

    @functools.wraps(stock_hasattr)
    def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
        found = has_attribute(self, type(fake_tensor(self)), name)
        return stock_hasattr(self, tx, name) if found is None else ConstantVariable.create(found)

    @functools.wraps(stock_getattr)
    def getattr_(self: Any, tx: Any, name: str) -> Any:
        found = attribute(tx, self, name)
        return stock_getattr(self, tx, name) if found is None else found

    return [
        SetAttribute(TensorVariable, "call_obj_hasattr", call_obj_hasattr),
        SetAttribute(TensorVariable, name, getattr_),
    ]


def on_construction(answers: Mapping[type, Callable[..., Any]]) -> list[Change]:
    """``cls(...)`` while tracing, where ``answers[cls](tx, args, kwargs)`` is not None.

    One call for all classes: a second would take the place of the first.
    """
    stock: Any = UserDefinedClassVariable.call_function

    @functools.wraps(stock)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        answer = next((answers[cls] for cls in answers if cls is self.value), None)
        found = None if answer is None else answer(tx, list(args), kwargs)
        return stock(self, tx, args, kwargs) if found is None else found

    return [SetAttribute(UserDefinedClassVariable, "call_function", call_function)]


# --- DTensor: loss_parallel -----------------------------------------------------------------------

enable_loss_ops: Callable[[], None] = vars(_loss)["_enable_custom_loss_ops"]
disable_loss_ops: Callable[[], None] = vars(_loss)["_disable_custom_loss_ops"]


def dtensor_op_handlers() -> dict[Any, Any]:
    """Operators that DTensor's dispatcher hands to a function of its own."""
    return DTensor._op_dispatcher._custom_op_handlers


def dtensor_state(tx: Any) -> dict[str, Any]:
    """Return the state that the tracing of DTensor's contexts keeps for one graph; new when Dynamo starts over."""
    found: dict[str, Any] = vars(tx.output).setdefault("_dynamo_dist_dtensor", {})
    return found


MODULE_HOOK = "module backward hook"
_HOOK_GRAPHS = (MODULE_HOOK, "register_hook")  # as the tracer of a hook's graph is described


def is_in_backward_hook(tx: Any) -> bool:
    """Return whether what is traced here is a hook: its gradients are examples, laid out as the forward's values."""
    return tx.output.current_tracer.description in _HOOK_GRAPHS


def is_tensor_of(tracker: Any, cls: type) -> bool:
    """Return whether it tracks a tensor of this class."""
    tracker = realized(tracker)
    return isinstance(tracker, TensorVariable) and isinstance(fake_tensor(tracker), cls)


def requires_grad(tracker: Any) -> bool:
    """Return whether the tracked tensor requires gradients."""
    return bool(fake_tensor(tracker).requires_grad)


def call_in_graph(tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One node of the graph that calls a Python function of ours; AOTAutograd looks into it."""
    proxy_args, proxy_kwargs = _proxy_args_kwargs(
        [realized(arg) for arg in args], {name: realized(arg) for name, arg in kwargs.items()}
    )
    proxy = tx.output.create_proxy("call_function", function, proxy_args, proxy_kwargs)
    return _builder.wrap_fx_proxy(tx=tx, proxy=proxy)


# --- DTensor: implicit replication ----------------------------------------------------------------


def implicit_replication() -> bool:
    """Return whether plain tensors among DTensors count as replicated."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def set_implicit_replication(on: bool) -> None:
    """Turn that switch."""
    DTensor._op_dispatcher._allow_implicit_replication = on


def restore_implicit_replication(tx: Any) -> None:
    """Have the switch be as it is now when Dynamo is done with the frame, or gives it up."""
    tx.output.add_cleanup_hook(functools.partial(set_implicit_replication, implicit_replication()))


def call_for_effect(tx: Any, function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` now, and in the graph."""
    tx.output.create_node("call_function", function, args, {})
    function(*args)


def keep_implicit_replication() -> list[Change]:
    """The switch is as it was once a graph is compiled; a graph compiled while it was on asks for it.

    Without it the program is one that eager refuses.
    """

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call_user_compiler(self: Any, *args: Any, **kwargs: Any) -> Any:
            on = implicit_replication()
            if on:
                _guards.install_guard(GlobalStateSource().make_guard(REPLICATES_IMPLICITLY))
            try:
                return stock(self, *args, **kwargs)
            finally:
                set_implicit_replication(on)

        return call_user_compiler

    return [WrapAttribute(OutputGraph, "call_user_compiler", changed)]


def REPLICATES_IMPLICITLY(builder: Any, guard: Any) -> None:
    """Guard: the switch is on."""
    code = _guards.get_verbose_code_parts("plain tensors count as replicated", guard)
    builder.guard_manager.root.add_lambda_guard(
        lambda _: implicit_replication(), code, guard.user_stack
    )


# --- DTensor: outputs that no loss uses -----------------------------------------------------------


def on_forward_with_tangents(
    cls: type, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Change]:
    """Run ``wrap(forward)`` for each forward whose backward takes several gradients, one of them a ``cls``."""

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_compile(
            self: Any, compiled_fn: Any, *args: Any, runtime_metadata: Any, **kwargs: Any
        ) -> Any:
            tangents = runtime_metadata.subclass_tangent_meta or ()
            kinds = [getattr(meta, "original_subclass_type", None) for meta in tangents]
            if self.trace_joint and len(kinds) > 1 and cls in kinds:
                compiled_fn = wrap(compiled_fn)
            return stock(self, compiled_fn, *args, runtime_metadata=runtime_metadata, **kwargs)

        return post_compile

    return [WrapAttribute(_runtime_wrappers.RuntimeWrapper, "post_compile", changed)]


def on_plain_tangent(
    cls: type, answer: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> list[Change]:
    """A plain gradient where the backward was traced with a ``cls``: ``answer(gradient, metadata)`` in its place.

    ``metadata``: what ``__tensor_flatten__`` gave. On None stock refuses it.
    """
    owner = _runtime_wrappers.AOTDispatchAutograd
    stock = owner.process_runtime_tangent

    @functools.wraps(stock)
    def process_runtime_tangent(x: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is torch.Tensor and getattr(meta, "original_subclass_type", None) is cls:
            found = answer(x, meta.meta)
            x = x if found is None else found
        return stock(x, meta, *args, **kwargs)

    return [SetAttribute(owner, "process_runtime_tangent", staticmethod(process_runtime_tangent))]


# --- DTensor: dynamic sizes -----------------------------------------------------------------------


def keep_first_symbols() -> list[Change]:
    """While AOTAutograd makes a graph, a size that is known as an input stays known as that input.

    Stock lets any later value that simplifies to the same symbol take its place, such as the
    ``sym_max(s0, 1)`` by which DTensor computes strides, whose own argument is then looked up as itself,
    without end. Seen in torch 2.12 to 2.15.
    """
    stock = _proxy_tensor.set_proxy_slot

    @functools.wraps(stock)
    def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
        known = expression = None
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = obj.node.expr
            known = tracer.sympy_expr_tracker.get(expression)
        stock(obj, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expression] = known

    return [SetAttribute(_proxy_tensor, "set_proxy_slot", set_proxy_slot)]


# --- DTensor: strided shards ----------------------------------------------------------------------


def keep_strided_shards() -> list[Change]:
    """A DTensor that a view left in strided shards goes through AOTAutograd's flattening and back.

    Such a view says by a flag that the order of its shards stands beside its placements; the flattened
    form lacks the flag, and an order that is there shows it was set. Seen in torch 2.11 to 2.15.
    """
    stock = DTensor.__tensor_unflatten__

    @functools.wraps(stock)
    def unflatten(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        placements, meta, *rest = context
        if len(rest) != 2 or rest[0] is None or not any(map(_is_strided_shard, placements)):
            return stock(inner, context, size, stride)
        spec = DTensorSpec(
            inner["device_mesh"],
            placements,
            tensor_meta=TensorMeta(size, stride, meta.dtype),
            shard_order=rest[0],
            use_strided_shard_as_shard_order=False,
        )
        return DTensor(inner["_local_tensor"], spec, requires_grad=rest[1])

    return [SetAttribute(DTensor, "__tensor_unflatten__", staticmethod(unflatten))]


def _is_strided_shard(placement: Any) -> bool:
    return isinstance(placement, _placement_types._StridedShard)


def count_strided_shards_with_real_tensors() -> list[Change]:
    """Compute the size of a strided shard with real tensors while tracing, not with fakes.

    Otherwise each index becomes an unknown size of the program's graph. A symbolic size is fixed, by a guard,
    up to 2.12, which cannot count with symbols. Seen in torch 2.11 to 2.15.
    """
    cls, name = _placement_types._StridedShard, "local_shard_size_and_offset"
    stock = vars(cls).get(name)
    if not inspect.isfunction(stock):
        return []

    @functools.wraps(stock)
    def size_and_offset(*args: Any, **kwargs: Any) -> Any:
        fake = _get_dispatch_mode(_ModeKey.FAKE) is not None
        args, kwargs = _pytree.tree_map_only(torch.SymInt, _known_size, (args, kwargs))
        if not fake or any(isinstance(arg, torch.SymInt) for arg in (*args, *kwargs.values())):
            return stock(*args, **kwargs)
        return counted(*args, **kwargs)

    @functools.lru_cache(maxsize=KEPT_OFFSETS)  # a list as long as the dimension
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return stock(*args, **kwargs)

    return [SetAttribute(cls, name, size_and_offset)]


def _known_size(size: torch.SymInt) -> int | torch.SymInt:
    """The number, where guards have fixed a symbolic size; up to 2.12 they do."""
    if not _REFUSES_SYMBOLIC_FACTORS and not has_free_unbacked_symbols(size):
        return int(size)
    known = size.node.maybe_as_int()
    return size if known is None else known


def fix_split_factors() -> list[Change]:
    """With dynamic sizes, a view that joins dimensions is laid out as in eager.

    Where a dimension behind the first is sharded, the product of those before it is how often its shards
    lie in the joined one, and must be a number: these sizes are fixed, by guards. Stock refuses the view
    from 2.13 on; there, on meshes of several dimensions, the tensor is gathered as before.
    """
    cls = vars(_view_ops).get("_ViewShardingPropagator")
    if not hasattr(cls, "_rewrite_plain_shard"):  # up to 2.11
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def rewrite(
            self: Any, p: Any, mesh_dim: int, placements: Any, claimed: Any, sizes: Any, *args: Any
        ) -> Any:
            sizes = list(sizes)
            several = len(self.mesh_sizes) > 1
            for joined in () if several and _REFUSES_SYMBOLIC_FACTORS else self.rule:
                if isinstance(joined, _view_ops.Flatten):
                    dims = [getattr(dim, "input_dim", None) for dim in joined.input_dims]
                    for dim in dims[: dims.index(p.dim)] if p.dim in dims else ():
                        if not has_free_unbacked_symbols(sizes[dim]):
                            sizes[dim] = int(sizes[dim])
            return stock(self, p, mesh_dim, placements, claimed, sizes, *args)

        return rewrite

    return [WrapAttribute(cls, "_rewrite_plain_shard", changed)]


def remember_redistributions() -> list[Change]:
    """While tracing, look for the way from one layout to another once.

    A strategy asks it of every layout of every argument. Stock remembers in eager alone, because sizes may be
    symbols in a trace; on a mesh of two dimensions the search takes tens of milliseconds where a shard is
    strided. Seen in torch 2.11 to 2.15.
    """
    name = "_gen_transform_infos_non_cached"
    stock = getattr(_redistribute, name, None)
    if stock is None:
        return []

    @functools.lru_cache(maxsize=KEPT_REDISTRIBUTIONS)
    def found(source: Any, target: Any, by_graph: Any, forced: Any, rank: int) -> Any:
        return stock(source, target, by_graph)

    @functools.wraps(stock)
    def find(source: Any, target: Any, use_graph_based_transform: Any = None) -> Any:
        # Shards of uneven sizes differ from rank to rank, and a process may play several.
        meta, rank = source.tensor_meta, source.mesh.get_rank()
        if meta is None or not all(isinstance(n, int) for n in (rank, *meta.shape, *meta.stride)):
            return stock(source, target, use_graph_based_transform)
        forced = getattr(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", None)
        return found(source, target, use_graph_based_transform, forced, rank)

    return [SetAttribute(_redistribute, name, find)]


# --- DTensor: strategies found through decompositions ---------------------------------------------


def search_decompositions_apart() -> list[Change]:
    """Let the search for an operator's strategy run outside the trace.

    Where an operator has no strategy, DTensor tries every placement on its decomposition with meta
    tensors. While tracing they become fakes, on which the search fails, and it asks past eager's cache,
    so that seconds become minutes. Sizes that are symbols belong to the trace and stay in it. Seen in
    torch 2.12 to 2.15; 2.11 has no such search.
    """
    module = _optional_module("torch.distributed.tensor._decompositions")
    if module is None:
        return []
    stock, is_tracing = module.DecompShardingStrategy.propagate_strategy, module._are_we_tracing
    searches: list[None] = []  # those apart from the trace that are under way

    @functools.wraps(stock)
    def propagate(self: Any, op_schema: Any) -> Any:
        if _has_symbols(op_schema):
            return stock(self, op_schema)
        searches.append(None)
        try:
            with _disable_current_modes():
                return stock(self, op_schema)
        finally:
            searches.pop()

    return [
        SetAttribute(module.DecompShardingStrategy, "propagate_strategy", propagate),
        SetAttribute(module, "_are_we_tracing", lambda: not searches and is_tracing()),
    ]


def _has_symbols(op_schema: Any) -> bool:
    leaves = _pytree.tree_leaves((op_schema.args_schema, op_schema.kwargs_schema))
    sizes = [leaf.shape if isinstance(leaf, DTensorSpec) else [leaf] for leaf in leaves]
    return any(isinstance(size, torch.SymInt) for each in sizes for size in each)


# --- Calls that make plain tensors among DTensors ------------------------------------------------


class _NoDraws(TorchDispatchMode):
    """Refuses operators that draw random numbers into plain tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and not any(isinstance(each, DTensor) for each in tree_leaves(given)):
            raise StrategyError(
                f"{func} draws random numbers for a tensor that an operator on DTensors makes inside.",
                "Each rank would draw its own.",
                "Draw them as a DTensor and pass it, or call the operator on local tensors.",
            )
        return func(*given[0], **given[1])


@contextlib.contextmanager
def made_tensors_are_replicas() -> Iterator[None]:
    """Inside, a plain tensor among DTensors stands for itself on every rank, and none is random."""
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        with _NoDraws():
            yield
    finally:
        dispatcher._allow_implicit_replication = before


def around_traced_calls(answer: Callable[[Callable[[], Any], Any], Any]) -> list[Change]:
    """Have ``answer(run, arguments)`` make each call of a graph, in Dynamo and in AOTAutograd.

    Dynamo runs a node on fake tensors by a function of its utilities; AOTAutograd traces the graph by an
    interpreter. Seen in 2.11 to 2.15.
    """

    def tried(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
            if node.op != "call_function":
                return stock(tracer, node, args, kwargs, nnmodule)
            return answer(lambda: stock(tracer, node, args, kwargs, nnmodule), (args, kwargs))

        return run_node

    def traced(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def run_node(self: Any, node: Any) -> Any:
            if node.op != "call_function":
                return stock(self, node)
            return answer(lambda: stock(self, node), self.fetch_args_kwargs_from_env(node))

        return run_node

    return [
        WrapAttribute(_dynamo_utils, "run_node", tried),
        WrapAttribute(PropagateUnbackedSymInts, "run_node", traced),
    ]
