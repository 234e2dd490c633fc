"""What the planner asks of DTensor: its dispatcher, propagation and redistribution."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor import _sharding_prop as propagation
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree as pytree

from dynamo_dist.program import Choice, Spec
from dynamo_dist.torch_compat.dtensor_dispatch import (
    Handler,
    as_upstream,
    dispatcher,
    propagator,
)
from dynamo_dist.torch_compat.dtensor_placements import placement, words
from dynamo_dist.torch_compat.dtensor_strategies import decided_operators, has_strategy
from dynamo_dist.torch_compat.patching import (
    SetAttribute,
    Upstream,
    WrapAttribute,
    WrapFunction,
    applied,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload

_dispatcher, _propagator = dispatcher(), propagator()


class Interception:
    """While applied, every DTensor operation goes through ``on_op``; the three functions besides it
    take a upstream function and its arguments, for explicit redistributes, their backward, and
    to_local.
    """

    def __init__(self, on_op: Handler, on_move: object, on_back: object, on_local: object) -> None:
        self.on_op = on_op
        self.patches = [
            WrapAttribute(owner, name, functools.partial(_before, function))
            for owner, name, function in (
                (redistribution.Redistribute, "forward", on_move),
                (redistribution.Redistribute, "backward", on_back),
                (api._ToTorchTensor, "forward", on_local),
            )
        ]

    def apply(self) -> None:
        table = _dispatcher._custom_op_handlers
        self.before = dict(table)
        for op in _known_ops():
            # A handler that forwards to another operator decides nothing: that one is intercepted.
            if not getattr(self.before.get(op), "forwards", False):
                table[op] = self.on_op
        for patch in self.patches:
            patch.apply()

    def undo(self) -> None:
        for patch in reversed(self.patches):
            patch.undo()
        table = _dispatcher._custom_op_handlers
        table.clear()
        table.update(self.before)

    def upstream(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``op`` as DTensor does by itself."""
        own = self.before.get(op)
        if own is not None:
            return own(op, args, kwargs)
        return as_upstream(op, self.on_op, args, kwargs)

    def has_own_rules(self, op: OpOverload) -> bool:
        """Return whether DTensor runs the op by a handler of its own, which chooses placements
        itself.
        """
        return op in self.before


def _before(function: Any, upstream: Upstream) -> staticmethod[..., object]:
    return staticmethod(functools.partial(function, upstream))


def _known_ops() -> set[object]:
    found = {*decided_operators(), *_dispatcher._custom_op_handlers}
    return found | _propagator.op_to_rules.keys()


def moved(tensor: DTensor, spec: Spec) -> DTensor:
    """``tensor`` redistributed to ``spec``, below autograd."""
    if words(tensor.placements) == spec:
        return tensor
    target = _spec(tensor.device_mesh, spec, tensor._spec.tensor_meta)
    local = redistribution.redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)
    return DTensor(local, target, requires_grad=False)


def _spec(mesh: DeviceMesh, spec: Spec, meta: Any) -> DTensorSpec:
    return DTensorSpec(mesh, tuple(placement(text) for text in spec), tensor_meta=meta)


def set_backward_target(ctx: Any, spec: Spec) -> None:
    """Let the backward of an explicit redistribute bring its gradient to ``spec``."""
    old = ctx.current_spec
    ctx.current_spec = _spec(old.mesh, spec, old.tensor_meta)


def schema_of(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The op with DTensors replaced by their specs."""
    return _dispatcher.unwrap_to_op_info(op, args, kwargs).schema


def propagated(schema: Any) -> Choice | None:
    """Return where DTensor would take the inputs of ``schema``, and where the outputs would lie.

    None if it refuses.
    """
    if not has_strategy(schema.op):
        return None
    try:
        result = _propagator.propagate_op_sharding_non_cached(schema)
    except Exception:  # a strategy may refuse in any way; what it refuses is no choice
        return None
    used = result.redistribute_schema if result.needs_redistribute else schema
    if used is None:
        return None
    return Choice(
        tuple(words(spec.placements) for spec in specs_in(used)),
        _spec_words(result.output_spec, 1),
    )


def remembered_ways() -> contextlib.AbstractContextManager[None]:
    """Find the way from one spec to another once, not each time that an operator's strategies are
    weighed.

    DTensor keeps what it found, but not while a graph is traced, because sizes may be symbols;
    those are found anew here too. On a mesh of two dimensions a search takes most of the time of a
    plan.
    """
    cache: dict[object, object] = {}

    def find(upstream: Upstream, *asked: object) -> object:
        try:
            if asked not in cache:
                cache[asked] = upstream(*asked)
        except TypeError:  # a symbol has no hash
            return upstream(*asked)
        return cache[asked]

    return applied(WrapFunction(redistribution, "_gen_transform_infos_non_cached", find))


def _spec_words(specs: Any, count: int) -> tuple[Spec | None, ...]:
    listed = specs if isinstance(specs, (list, tuple)) else [specs] * count
    return tuple(None if spec is None else words(spec.placements) for spec in listed)


def _choice_of(strategy: Any, inputs: int, outputs: int) -> Choice:
    """A strategy of DTensor's in the planner's words; one that names no inputs follows its
    output.
    """
    given = strategy.input_specs
    sources = [strategy.output_specs] * inputs if given is None else given
    return Choice(
        tuple(words(spec.placements) for spec in sources),
        _spec_words(strategy.output_specs, outputs),
    )


def _selecting(select: Upstream) -> contextlib.AbstractContextManager[None]:
    """Replace how DTensor picks one of an op's strategies; ``select`` gets upstream's way first."""
    return applied(WrapFunction(propagation, "_select_min_cost_strategy", select))


def offered(schema: object, inputs: int, outputs: int) -> list[Choice]:
    """Every strategy that DTensor weighs for ``schema``."""
    found: list[Choice] = []

    def select(upstream: Upstream, strategies: Any, *rest: object) -> object:
        found.extend(_choice_of(s, inputs, outputs) for s in strategies.strategies)
        return upstream(strategies, *rest)

    with _selecting(select):
        propagated(schema)
    return found


@contextlib.contextmanager
def steered(choice: Choice | None) -> Iterator[None]:
    """Let DTensor pick ``choice`` where it is among an op's strategies.

    Left alone it takes any that costs least by its own reckoning, and replicated tensors are
    turned into partial sums for nothing.
    """
    if choice is None:
        yield
        return

    def select(upstream: Upstream, strategies: Any, *rest: object) -> object:
        for s in strategies.strategies:
            if _choice_of(s, len(choice.inputs), len(choice.outputs)) == choice:
                return s
        return upstream(strategies, *rest)

    with _selecting(select):
        yield


def specs_in(schema: Any) -> list[DTensorSpec]:
    """The specs among the arguments, in order."""
    leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def with_specs(schema: Any, mesh: DeviceMesh, specs: Sequence[Spec]) -> object:
    """The same op with other placements on another mesh."""
    given = iter(specs)

    def other(leaf: object) -> object:
        if isinstance(leaf, DTensorSpec):
            return _spec(mesh, next(given), leaf.tensor_meta)
        return leaf

    args, kwargs = pytree.tree_map(other, (schema.args_schema, schema.kwargs_schema))
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def line_mesh(device_type: str, size: int) -> DeviceMesh:
    """A mesh of one dimension that only lends its size: it has no process group."""
    return DeviceMesh(device_type, torch.arange(size), _init_backend=False)


def known_outputs(metas: object) -> contextlib.AbstractContextManager[None]:
    """Let DTensor not run an op on fake tensors to learn the shapes of outputs that are known."""
    names = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    return applied(*(SetAttribute(_propagator, name, lambda schema: metas) for name in names))


def output_metas(schema: object) -> object:
    """Global shapes of what ``schema`` makes, as DTensor keeps them."""
    return _propagator._propagate_tensor_meta_non_cached(schema)


def is_random(op: OpOverload) -> bool:
    """Return whether numbers depend on the placement: those of random ops do."""
    tags: Sequence[object] = getattr(op, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
