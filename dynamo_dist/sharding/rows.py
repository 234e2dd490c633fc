"""A row of placements on one mesh dimension, and its expansion to a whole mesh.

A row lists, for one mesh dimension, the placement of every tensor result and then of every tensor
argument of an operator: the local operator on arguments placed so gives results placed so. Rows are
independent from mesh dimension to mesh dimension, which is what makes the expansion right.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# A placement for each tensor result, then for each tensor argument; None for a result that is None.
Row = tuple[Placement | None, ...]
R, P = Replicate(), Partial()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator as a strategy sees it.

    ``args`` has one entry for each argument of the operator's schema, defaults filled in, with a
    TensorMeta (global shape, strides, dtype) for each tensor. ``tensors`` are those in order.
    """

    op: dtensor_specs.OpOverload
    args: dict[str, Any]
    tensors: tuple[Any, ...]
    results: int

    def ndim(self, name: str) -> int:
        """Dimensions of a tensor argument."""
        return len(self.args[name].shape)

    def row(self, results: Sequence[Placement | None], /, **arguments: Placement) -> Row:
        """A row by name of the tensor arguments; those not named are replicated, absent ones
        left out.
        """
        if unknown := arguments.keys() - self.args.keys():
            raise StrategyError(
                f"A row of {self.op} places {sorted(unknown)}, expected some of {list(self.args)}.",
                "A row places arguments by the names of the operator's schema.",
                f"Write them as in {self.op._schema}.",
            )
        present = [
            name for name, value in self.args.items() if isinstance(value, dtensor_specs.TensorMeta)
        ]
        return (*results, *(arguments.get(name, R) for name in present))


Rows = Callable[[Call], list[Row]]


def strategy(rows: Rows, any_part: bool = False) -> dtensor_dispatch.Strategy:
    """The strategy that allows ``rows`` and all replicated, on each mesh dimension.

    any_part: the rows hold whichever elements a rank has, as long as it has the same of every
    argument: none at all, or those of a strided shard, as the weights of tensor and data
    parallelism have it.
    """

    def decide(schema: dtensor_specs.OpSchema) -> dtensor_specs.OpStrategy:
        inputs = tensor_strategies(schema)
        call = call_of(schema, inputs)
        return expand(
            schema, inputs, [*rows(call), (R,) * (call.results + len(inputs))], call, any_part
        )

    return functools.wraps(rows)(decide)


def tensor_strategies(schema: dtensor_specs.OpSchema) -> list[dtensor_specs.OpStrategy]:
    """The tensor arguments, those inside lists among them, in order."""
    found: list[dtensor_specs.OpStrategy] = []
    for value in (*schema.args_schema, *schema.kwargs_schema.values()):
        children = value.children if isinstance(value, dtensor_specs.TupleStrategy) else [value]
        if isinstance(value, (list, tuple)):
            children = list(value)
        found += [child for child in children if isinstance(child, dtensor_specs.OpStrategy)]
    return found


def shapes_and_placements(specs: Sequence[Any]) -> str:
    """Global shapes and placements, for messages."""
    return ", ".join(f"{tuple(spec.shape)} in {spec.placements}" for spec in specs)


def call_of(schema: dtensor_specs.OpSchema, inputs: Sequence[dtensor_specs.OpStrategy]) -> Call:
    """The call without its layouts."""

    def meta(value: object) -> object:
        if isinstance(value, dtensor_specs.OpStrategy):
            return value.strategies[0].output_spec.tensor_meta
        if isinstance(value, dtensor_specs.TupleStrategy):
            return [meta(child) for child in value.children]
        return [meta(child) for child in value] if isinstance(value, (list, tuple)) else value

    arguments = schema.op._schema.arguments
    args = {argument.name: argument.default_value for argument in arguments}
    args.update(zip((a.name for a in arguments), map(meta, schema.args_schema), strict=False))
    args.update({name: meta(value) for name, value in schema.kwargs_schema.items()})
    results = sum("Tensor" in str(result.type) for result in schema.op._schema.returns)
    return Call(
        schema.op, args, tuple(i.strategies[0].output_spec.tensor_meta for i in inputs), results
    )


def expand(
    schema: dtensor_specs.OpSchema,
    inputs: Sequence[dtensor_specs.OpStrategy],
    rows: Sequence[Row],
    call: Call,
    any_part: bool,
) -> dtensor_specs.OpStrategy:
    """Every combination of rows over the mesh in which each rank holds a part of every sharded
    input.

    Where rows hold for ``any_part``, an input that stays as it is may be so sharded that some hold
    nothing.
    """
    mesh = inputs[0].strategies[0].output_spec.mesh
    current: list[Any] = [each.strategies[0].output_spec for each in inputs]
    fixed, written = _fixed(schema, inputs)
    found = []
    choices = [
        dict.fromkeys([*rows, *(_strided(rows, placements) if any_part else ())])
        for placements in zip(*(now.placements for now in current), strict=True)
    ]
    for combination in itertools.product(*choices):
        placements = list(zip(*combination, strict=True))
        # Rows are independent by mesh dimension, except where two kinds of Partial meet in one
        # tensor.
        if any(mixes_partials(each) for each in placements):
            continue
        results, arguments = placements[: call.results], placements[call.results :]
        if not all(
            (any_part and each == now.placements) or is_whole(mesh, each, now.tensor_meta.shape)
            for each, now in zip(arguments, current, strict=True)
        ):
            continue
        if not all(
            is_reachable(now.placements, each) for now, each in zip(current, arguments, strict=True)
        ):
            continue
        # Torch does not redistribute these, so the row would describe another call.
        if any(arguments[at] != current[at].placements for at in fixed):
            continue
        # What is written to is the result too, and stays where it is.
        if written and results[:written] != [arguments[at] for at in fixed[:written]]:
            continue
        specs = [
            dtensor_specs.spec(mesh, each, now.tensor_meta)
            for each, now in zip(arguments, current, strict=True)
        ]
        outputs = tuple(
            None if None in each else dtensor_specs.spec(mesh, each) for each in results
        )
        found.append(
            dtensor_specs.OpSpec(
                output_specs=outputs if len(outputs) != 1 else outputs[0],
                input_specs=specs,
                redistribute_cost=[
                    dtensor_specs.redistribute_costs(each, spec)
                    for each, spec in zip(inputs, specs, strict=True)
                ],
            )
        )
    if not found:
        raise NotImplementedError(
            f"{schema.op} keeps arguments where they are: {[each.placements for each in current]}"
        )
    return dtensor_specs.OpStrategy(found)


def _strided(rows: Sequence[Row], placements: Sequence[Placement]) -> list[Row]:
    """``rows`` with the strided shards that are among the ``placements`` in place of contiguous
    ones.
    """
    found: list[Any] = [p for p in placements if hasattr(p, "split_factor")]
    return [
        tuple(type(s)(p.dim, split_factor=s.split_factor) if isinstance(p, Shard) else p for p in r)
        for s in found
        for r in rows
    ]


def is_reachable(now: Sequence[Placement], wanted: Sequence[Placement | None]) -> bool:
    """Return whether torch can redistribute so: not into another pending reduction, nor from shards
    into one.

    A product or a bitwise reduction cannot be pending of what every rank has.
    """
    return all(
        not isinstance(to, Partial)
        or now_at == to
        or (isinstance(now_at, Replicate) and to.reduce_op in ("sum", "avg", "min", "max"))
        for now_at, to in zip(now, wanted, strict=True)
    )


def _fixed(
    schema: dtensor_specs.OpSchema, inputs: Sequence[dtensor_specs.OpStrategy]
) -> tuple[list[int], int]:
    """Positions of the tensor arguments that stay where they are, and how many of them are written
    to.

    Torch redistributes neither what an operator writes to nor arguments given by name.
    """
    written = [
        at
        for argument, value in zip(schema.op._schema.arguments, schema.args_schema, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for at, each in enumerate(inputs)
        if each is value
    ]
    named = [
        at
        for value in schema.kwargs_schema.values()
        for at, each in enumerate(inputs)
        if each is value
    ]
    return [*written, *named], len(written)


def mixes_partials(placements: Sequence[Placement | None]) -> bool:
    """Return whether sums would be pending beside other reductions, which do not commute with them.

    Nor do two masks: each takes its own mesh dimension's part of the indices for the whole.
    """
    partials = [p for p in placements if isinstance(p, Partial)]
    if len(partials) > 1 and any(type(p) is not Partial for p in partials):
        return True
    kinds = {
        (type(p), p.reduce_op if p.reduce_op != "avg" else "sum")
        for p in placements
        if isinstance(p, Partial)
    }
    return len(kinds) > 1


def is_whole(
    mesh: DeviceMesh, placements: Sequence[Placement | None], shape: Sequence[int]
) -> bool:
    """Return whether every rank holds at least one element along each sharded dimension."""
    smallest = list(shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        dim = dtensor_specs.sharded_dim(placement)
        if dim is None:
            continue
        # The bound comes first: from it torch learns a symbolic size's range, which keeps
        # expressions small.
        if dim >= len(smallest) or smallest[dim] < size:
            return False
        if (factor := dtensor_specs.split_factor(placement)) is not None:
            if smallest[dim] % (size * factor) != 0:
                return False
            smallest[dim] //= size
        elif isinstance(placement, Shard):
            smallest[dim] = _last_chunk(smallest[dim], size)
        else:
            return False
        if not smallest[dim] > 0:
            return False
    return True


def is_even(spec: Any, shape: Sequence[int]) -> bool:
    """Return whether all ranks hold equally much of a tensor of this global shape."""
    shards: dict[int, int] = {}
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            dim = placement.dim
            factor = dtensor_specs.split_factor(placement)
            shards[dim] = shards.get(dim, 1) * size * (1 if factor is None else factor)
    return all(dim < len(shape) and shape[dim] % count == 0 for dim, count in shards.items())


def elements(spec: DTensorSpec, shape: Sequence[int]) -> Sequence[object]:
    """Count the elements that each rank holds of a tensor of this global shape; Shard and
    Replicate alone.
    """
    counts = []
    for coordinate in itertools.product(*map(range, spec.mesh.shape)):
        local = list(shape)
        for at, size, placement in zip(coordinate, spec.mesh.shape, spec.placements, strict=True):
            if isinstance(placement, Shard):
                length = local[placement.dim]
                # As torch.chunk cuts: the first parts are full, the last ones ragged or empty.
                chunk = (length + size - 1) // size
                local[placement.dim] = max(min(chunk, length - at * chunk), 0)
        counts.append(math.prod(local))
    return counts


def _last_chunk(length: Any, chunks: int) -> Any:
    return length - (chunks - 1) * ((length + chunks - 1) // chunks)
