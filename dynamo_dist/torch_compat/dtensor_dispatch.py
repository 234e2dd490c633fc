"""DTensor's dispatcher: operators as it sees them, and its cache of decisions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.utils as _dynamo_utils
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._library import custom_ops
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, OutputSharding, TupleStrategy
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.nn.utils import clip_grad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapAttribute, WrapFunction

if TYPE_CHECKING:
    from torch import fx

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
# An OpStrategy, or a TupleStrategy for operators on lists.
Strategy = Callable[[OpSchema], Any]
Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def dispatcher() -> Any:
    """The one ``OpDispatcher`` of the process."""
    return DTensor._op_dispatcher


def propagator() -> Any:
    """The one ``ShardingPropagator`` of the process."""
    return dispatcher().sharding_propagator


class _NoDraws(TorchDispatchMode):
    """Refuses operators that draw random numbers into plain tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        # Higher-order operators have no tags, and what they call comes here by itself.
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if draws and not any(isinstance(each, DTensor) for each in tree_leaves(given)):
            raise StrategyError(
                f"{func} draws random numbers for a tensor that an operator on DTensors makes "
                "inside.",
                "Each rank would draw its own.",
                "Draw them as a DTensor and pass it, or call the operator on local tensors.",
            )
        return func(*given[0], **given[1])


@contextlib.contextmanager
def plain_tensors_are_replicas() -> Iterator[None]:
    """Inside, a plain tensor among DTensors stands for itself on every rank."""
    # The flag is the process's: nested blocks and the backward's own use of it must find what they
    # left, and a program's own mistake would be hidden if it stayed set.
    before = dispatcher()._allow_implicit_replication
    dispatcher()._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher()._allow_implicit_replication = before


@contextlib.contextmanager
def made_tensors_are_replicas() -> Iterator[None]:
    """Inside, a plain tensor among DTensors stands for itself on every rank, and none is random."""
    with plain_tensors_are_replicas(), _NoDraws():
        yield


def around_traced_calls(answer: Callable[[Callable[[], Any], Any], Any]) -> list[Patch]:
    """Have ``answer(run, arguments)`` make each call of a graph, in Dynamo and in AOTAutograd.

    Dynamo runs a node on fake tensors by a function of its utilities; AOTAutograd traces the graph
    by an interpreter. Seen in 2.13 to 2.15.
    """

    def tried(
        upstream: Upstream,
        tracer: object,
        node: fx.Node,
        args: object,
        kwargs: object,
        nnmodule: object,
    ) -> object:
        if node.op != "call_function":
            return upstream(tracer, node, args, kwargs, nnmodule)
        return answer(lambda: upstream(tracer, node, args, kwargs, nnmodule), (args, kwargs))

    def traced(upstream: Upstream, self: Any, node: Any) -> object:
        if node.op != "call_function":
            return upstream(self, node)
        return answer(lambda: upstream(self, node), self.fetch_args_kwargs_from_env(node))

    return [
        WrapFunction(_dynamo_utils, "run_node", tried),
        WrapFunction(PropagateUnbackedSymInts, "run_node", traced),
    ]


# Of numbers where a tensor may stand, by the dtype they have there.
_NUMBERS = {torch.float64: 1.0, torch.int64: 1, torch.bool: True, torch.complex128: 1j}


def one_decision_for_numbers() -> list[Patch]:
    """Decide a number and a replicated tensor of no dimensions in the same way, as one argument.

    The cache's key has the same entry for both. ``x - 1.0`` was served the decision for ``x - t``,
    a Partial sum from which every rank takes 1; the other way round it failed. Both are decided as
    the number is, and the decision names a layout for either.
    """

    def propagate(
        upstream: Upstream,
        self: object,
        op: OpOverload,
        args: object,
        kwargs: object,
        op_info: Any,
        *rest: object,
    ) -> object:
        # The key of eager's cache is made from this schema, so it is the schema that has to
        # change and not the call.
        schema = op_info.schema
        alike = _alike(schema) if _takes_numbers(op) else {}
        if not alike:
            return upstream(self, op, args, kwargs, op_info, *rest)
        values = list(schema.args_schema)
        for at, spec in alike.items():
            values[at] = _NUMBERS[spec.tensor_meta.dtype]  # type: ignore[union-attr]
        op_info.schema = OpSchema(
            op, tuple(values), schema.kwargs_schema, schema_info=schema.schema_info
        )
        try:
            found = upstream(self, op, args, kwargs, op_info, *rest)
        finally:
            # The dispatcher reads it again for the local arguments, which have the tensor where
            # it was.
            op_info.schema = schema
        # With that flag torch takes the arguments themselves from the schema, a number as a
        # number.
        if isinstance(found, OutputSharding) and not found.use_val_from_redistribute_schema:
            moved = found.redistribute_schema
            if moved is not None:
                moved.args_schema = tuple(
                    alike.get(at, value) for at, value in enumerate(moved.args_schema)
                )
        return found

    name = "_propagate_op_sharding_dispatch_slow_path"
    return [WrapFunction(OpDispatcher, name, propagate)]


def _takes_numbers(op: OpOverload) -> bool:
    """Return whether a number may stand where the schema of ``op`` has a tensor, and each
    element is by itself.
    """
    name = op._schema.name.partition("::")[2]
    return torch.Tag.pointwise in op.tags and torch._C._should_allow_numbers_as_tensors(name)


def _alike(schema: OpSchema) -> dict[int, DTensorSpec]:
    """Layouts of the arguments after the first that are numbers for the key, by position."""
    found = {}
    for at, argument in enumerate(schema.op._schema.arguments[: len(schema.args_schema)]):
        value = schema.args_schema[at]
        # The first argument gives the call its mesh and is always a DTensor here.
        if at == 0 or str(argument.type) != "Tensor":
            continue
        if isinstance(value, DTensorSpec):
            meta = value.tensor_meta
            replicated = all(isinstance(each, Replicate) for each in value.placements)
            # A tensor of no dimensions in another dtype has a key of its own: no number has that
            # dtype.
            if meta is not None and not meta.shape and replicated and meta.dtype in _NUMBERS:
                found[at] = value
        else:
            dtype = next((d for d, number in _NUMBERS.items() if type(number) is type(value)), None)
            if dtype is not None:
                mesh = schema.get_mesh_from_args()
                meta = TensorMeta(torch.Size(()), (), dtype)
                found[at] = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return found


def adjusts_shapes(op: OpOverload) -> bool:
    """Return whether torch rewrites arguments of ``op`` that are global shapes, so that local
    ones differ.
    """
    return op in propagator().op_to_shape_and_stride_idx


def shapes_of_results(
    schema: OpSchema, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Return the result shapes for tensor arguments of these shapes; None if the operator fails."""
    left = iter(shapes)

    def fake(value: object) -> object:
        if isinstance(value, OpStrategy):
            meta = value.strategies[0].output_spec.tensor_meta
            assert meta is not None
            return torch.empty(next(left), dtype=meta.dtype)
        if isinstance(value, TupleStrategy):
            return [fake(child) for child in value.children]
        return [fake(child) for child in value] if isinstance(value, (list, tuple)) else value

    # Only shapes are wanted: no data is computed, and no rank is simulated.
    with maybe_disable_local_tensor_mode(), detect_fake_mode() or FakeTensorMode():
        args = [fake(value) for value in schema.args_schema]
        kwargs = {name: fake(value) for name, value in schema.kwargs_schema.items()}
        try:
            results = schema.op(*args, **kwargs)
        except Exception:
            return None
    return [tuple(r.shape) for r in tree_leaves(results) if isinstance(r, torch.Tensor)]


def as_upstream(
    op: OpOverload, handler: Handler, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """The call as it would be answered if ``handler``, which makes it, or one around it were not
    there.
    """
    handlers = dispatcher()._custom_op_handlers
    # Torch looks its handlers up on each call, so without the entry the call goes on to the
    # strategies.
    found = handlers.pop(op, handler)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = found


def on_clipping(clip: Callable[..., None]) -> list[Patch]:
    """Have ``clip(upstream, parameters, max_norm, total_norm, foreach)`` scale gradients to a norm.

    Torch's function for it has this name in 2.13 to 2.15.
    """

    def clipping(upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def scale(
            parameters: object, max_norm: float, total_norm: object, foreach: bool | None = None
        ) -> None:
            clip(upstream, parameters, max_norm, total_norm, foreach)

        return scale

    return [WrapAttribute(clip_grad, "_clip_grads_with_norm_", clipping, traced=True)]


def decomposition(op: OpOverload) -> Callable[..., object] | None:
    """Return torch's computation of ``op`` by other operators, or None."""
    if op in decomposition_table:
        return decomposition_table[op]
    return op.decompose if op._can_decompose() else None


def overloads(name: str) -> Iterator[OpOverload]:
    """The overload ``aten.max.dim``, or nothing if this torch lacks it."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is not None and overload in found.overloads():
        yield getattr(found, overload)


OPERATORS = (OpOverload, OpOverloadPacket)


def is_custom_op(name: str) -> bool:
    """Return whether ``torch.library.custom_op`` made the operator, so that its schema is checked.

    Its implementations run below autograd anyway. ``OPDEFS`` was seen in 2.13 to 2.15.
    """
    return name in custom_ops.OPDEFS
