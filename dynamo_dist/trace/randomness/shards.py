"""Draws of sharded DTensors: each shard its own numbers, its replicas the same, all generators in step.

Torch does so on CUDA, for the operators that it knows. On the CPU, equal generators would give every
shard the same numbers, and shards of unequal lengths would leave the generators unequal. Here a draw
takes one number of the generator, whatever is drawn, and the shard draws after that number and its
position. In a graph it is one operator of torch's random ones with the position before its arguments,
``dynamo_dist_random::rand_like(shard, ...)``; Inductor computes it as its own draws, by a seed that the
position is added to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist.torch_compat.aot import random as random_compat
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dtensor import draws
from dynamo_dist.torch_compat.inductor import draws as in_inductor
from dynamo_dist.trace.randomness import replicas

# In-place operators in their functional form, where it is not the name without the underscore.
_FUNCTIONAL = {
    "bernoulli_.float": "bernoulli.p",
    "normal_.default": "normal_functional.default",
    "rrelu_with_noise.default": "rrelu_with_noise_functional.default",
}
# What becomes an operator of a graph: random operators of torch whose results hold their arguments' dimensions.
_NAMES = """
    rand_like.default randn_like.default randint_like.default randint_like.low_dtype randint_like.Tensor
    native_dropout.default bernoulli.default bernoulli.p bernoulli.Tensor uniform.default
    normal_functional.default normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor
    exponential.default geometric.default log_normal.default cauchy.default
    random.default random.from random.to
    poisson.default binomial.default _standard_gamma.default multinomial.default
    rrelu_with_noise_functional.default
""".split()

# Not dynamo_dist, whose operators are launches.
NAMESPACE = "dynamo_dist_random"
# What Inductor's decompositions of them draw.
_FACTORIES = ["rand.default", "randn.default", "randint.low"]

_library = torch.library.Library(NAMESPACE, "DEF")


def position(mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """Return the index of the shard of a layout that this rank holds, counted over the mesh dimensions that shard it.

    None for a layout without shards: replicas draw as on one device. None too on a rank outside of the mesh.
    """
    if mesh.get_coordinate() is None:
        return None
    found, sharded = 0, False
    for mesh_dim, placement in enumerate(placements):
        if holds_parts(placement) and mesh.size(mesh_dim) > 1:
            found = found * mesh.size(mesh_dim) + draws.coordinate(mesh, mesh_dim)
            sharded = True
    return found if sharded else None


def holds_parts(placement: Any) -> bool:
    """Return whether ranks along the mesh dimension hold different parts, not replicas or summands."""
    return draws.is_sharded(placement)


def draw(op: Any, shard: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on the local tensors of one shard, or of replicas if it is None: now, or in the graph that is traced.

    A generator among ``kwargs`` takes the place of the device's own. No graph takes one, as in stock.
    """
    if shard is None:
        return op(*args, **kwargs)
    if kwargs.get("generator") is not None or draws.is_eager(args):
        return _drawn(op, shard, args, kwargs)
    written = [
        value
        for argument, value in zip(op._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    name = _functional(op) if written else _name(op)
    if name not in _NAMES:
        return op(*args, **kwargs)
    _inductor.fill()
    args, kwargs = _bound(op, args, kwargs)
    found = _operator(name)(shard, *args, **kwargs)
    if not written:
        return found
    # In its functional form the operator gives what it wrote, behind its result.
    results = found if isinstance(found, (tuple, list)) else [found]
    copied = [
        to.copy_(result) for to, result in zip(written, results[-len(written) :], strict=True)
    ]
    return results[0] if len(results) > len(copied) else copied[0]


def _bound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """With defaults and what was given by name in its place, for forms that name and default otherwise."""
    left = {key: value for key, value in kwargs.items() if key != "generator"}
    by_name = [each for each in op._schema.arguments[len(args) :] if not each.kwarg_only]
    return (*args, *(left.pop(each.name, each.default_value) for each in by_name)), left


def _drawn(op: Any, shard: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
    device = torch.device(kwargs.get("device") or "cpu") if tensor is None else tensor.device
    with _of_shard(kwargs.get("generator") or draws.default_generator(device), shard):
        return op(*args, **kwargs)


@contextmanager
def _of_shard(generator: torch.Generator, shard: int) -> Iterator[None]:
    """Let ``generator`` draw the shard's numbers in the block; afterwards it has drawn one number."""
    number = draws.next_number(generator)
    after = generator.get_state()
    try:
        generator.manual_seed((number + shard) % 2**63)
        yield
    finally:
        generator.set_state(after)


def _name(op: Any) -> str:
    return f"{op._schema.name.partition('::')[2]}.{op._overloadname}"


def _functional(op: Any) -> str:
    name, overload = _name(op).split(".")
    return _FUNCTIONAL.get(f"{name}.{overload}", f"{name.removesuffix('_')}.{overload}")


def _stock(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


def _operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.dynamo_dist_random, packet), overload)


def _define(name: str) -> None:
    op = _stock(name)
    if op is None:
        return
    own = name.removesuffix(".default")
    # Inductor reads signatures as Python's, where "from" is a keyword.
    arguments = str(op._schema).partition("(")[2].replace(" from", " low")
    _library.define(
        f"{own}(SymInt shard, {arguments}",
        # It reads the generator's state, which no CUDA graph records.
        tags=(
            torch.Tag.pt2_compliant_tag,
            torch.Tag.nondeterministic_seeded,
            torch.Tag.cudagraph_unsafe,
        ),
    )

    def run(shard: int, *args: Any, **kwargs: Any) -> Any:
        return _drawn(op, shard, args, kwargs)

    def fake(shard: int, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    _library.impl(own, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{own}", fake, lib=_library)


for each in (*_NAMES, *_FACTORIES):
    _define(each)


class _Draw:
    """Stands for a random operator where torch's dispatcher calls it on one shard's local tensors."""

    def __init__(self, op: Any, shard: Any) -> None:
        self.op, self.shard = op, shard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return draw(self.op, self.shard, args, kwargs)

    # Behind a redistribution the dispatcher calls what that was decided for, unless it is equal to this. By its
    # hash it is not in the set of random operators.
    def __eq__(self, other: object) -> bool:
        return other is self or other is self.op

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)


def _factory(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.tensor.rand`` and ``randn`` on the CPU, which stock refuses: made empty, then filled."""

    @functools.wraps(stock)
    def made(init_op: Any, size: Any, *layout: Any, **kwargs: Any) -> Any:
        if init_op is not torch.rand and init_op is not torch.randn:
            return stock(init_op, size, *layout, **kwargs)
        empty = stock(torch.empty, size, *layout, **{**kwargs, "requires_grad": False})
        if empty.device_mesh.device_type != "cpu":
            return stock(init_op, size, *layout, **kwargs)
        filled = empty.uniform_() if init_op is torch.rand else empty.normal_()
        return filled.requires_grad_(kwargs["requires_grad"])

    return made


def _operators() -> dict[Any, Any]:
    names = [name for name in (*_NAMES, *_FACTORIES) if _stock(name) is not None]
    return {_stock(name): _operator(name) for name in names}


class _Inductor:
    """Tell Inductor how shards draw, once a graph holds such a draw: its tables take a second to import."""

    def __init__(self) -> None:
        self._made: list[Change] = []

    def apply(self) -> None:
        pass

    def fill(self) -> None:
        """Change the tables, unless that is done."""
        if not self._made:
            self._made = in_inductor.decompose_for_inductor(_operators())
            for change in self._made:
                change.apply()

    def undo(self) -> None:
        while self._made:
            self._made.pop().undo()


_inductor = _Inductor()


def changes() -> list[Change]:
    """List the changes that enabling makes: shards draw by their positions, in Python and in Inductor's graphs."""
    return [
        *draws.on_draw(replicas.note, lambda op, *layout: _Draw(op, position(*layout))),
        *draws.on_factory(_factory),
        *random_compat.known_as_random(_operators().values()),
        _inductor,
    ]
