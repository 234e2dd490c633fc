"""Draws of DTensors: where torch draws, and generators of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed.tensor._api as _dtensor_api
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dynamo_dist.torch_compat.changes import Change, SetItem, WrapAttribute
from dynamo_dist.torch_compat.dtensor.calls import dispatcher
from dynamo_dist.torch_compat.dtensor.operators import as_stock


def on_draw(
    note: Callable[[Any], object], drawer: Callable[[Any, Any, Any], Callable[..., Any]]
) -> list[Change]:
    """Have ``drawer(op, mesh, placements)`` give what draws in place of ``op`` on local tensors.

    Where torch gives each shard numbers of its own it draws itself. ``note(spec)`` is told of each draw that is
    traced. Torch decides for the layout and runs what it is given as any operator, since that is not in its set
    of random ones. Its C++ keeps the method that runs one from the first call on, so that a change of the method
    would come too late. Seen in 2.13 to 2.15.
    """

    def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, dtensors = args[0], dispatcher()
        if _are_we_tracing():
            note(given._spec)
        if draws_at_offsets(given.device_mesh):
            return as_stock(op, draw, args, kwargs)
        info = dtensors.unwrap_to_op_info(op, args, kwargs)
        decided = dtensors._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
        if not isinstance(decided, OutputSharding):  # the result of another way
            return decided
        output: Any = decided.output_spec
        info.output_sharding = decided
        spec = output[0] if isinstance(output, (tuple, list)) else output
        # Threads that are ranks share a decision, and with it the mesh of one of them.
        drawn = drawer(op, given.device_mesh, spec.placements)
        results = dtensors._dispatch_get_local_results_slow_path(drawn, args, info)
        return given if op._schema.is_mutable else dtensors.wrap(results, output)

    return [
        SetItem(dispatcher()._custom_op_handlers, op, draw)
        for op in dispatcher()._random_ops
        if not any(argument.is_out for argument in op._schema.arguments)
    ]


def on_factory(wrap: Callable[[Any], Any]) -> list[Change]:
    """Have ``wrap(stock)`` answer ``torch.distributed.tensor``'s factories. Seen in 2.13 to 2.15."""
    return [WrapAttribute(_dtensor_api, "_dtensor_init_helper", wrap, traced=True)]


def draws_at_offsets(mesh: Any) -> bool:
    """Return whether torch gives the shards of a mesh's devices numbers of their own."""
    return hasattr(_get_device_handle(mesh.device_type), "set_rng_state")


def is_sharded(placement: Any) -> bool:
    """Return whether ranks along the mesh dimension hold different parts."""
    return placement.is_shard() or isinstance(placement, _StridedShard)


def coordinate(mesh: Any, mesh_dim: int) -> Any:
    """Return this rank's coordinate along a dimension of its mesh; symbolic where one rank compiles for all."""
    return mesh._sym_get_coordinate(mesh_dim)


def is_eager(args: Iterable[Any]) -> bool:
    """Return whether an operator on these would compute at once: no tensor is fake, traced or without data."""
    return get_proxy_mode() is None and all(
        type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta
        for each in args
        if isinstance(each, torch.Tensor)
    )


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on ``device`` use unless they are given one."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found


def next_number(generator: torch.Generator) -> int:
    """One number of 63 bits, unseen by modes that watch operators."""
    with _disable_current_modes():
        number = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(number.random_(generator=generator))


_DRAWN_BY_SEED = ("aten.rand.default", "aten.randn.default", "aten.randint.low")


class _OfShard(TorchDispatchMode):
    """The draws that Inductor makes by seeds are those of a shard in the block. Seen in 2.13 to 2.15."""

    def __init__(self, shard: Any, own: Mapping[Any, Any]) -> None:
        super().__init__()
        self.shard, self.own = shard, own

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._inductor.decomposition import fast_random_decomps

        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **kwargs)
        decomposition = fast_random_decomps().get(op)
        if decomposition is None or str(op) in _DRAWN_BY_SEED:
            return self.own[op](self.shard, *args, **kwargs)
        with self:
            return decomposition(*args, **kwargs)


def random_state(device_type: str) -> torch.Tensor:
    """The state of the generator that operators of a device type use by default, as bytes on the CPU."""
    return default_generator(torch.device(device_type)).get_state()
