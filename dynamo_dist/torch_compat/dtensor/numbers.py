"""Numbers on DTensors: whole ones in parts, pending ones before collectives, symbolic results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute
from dynamo_dist.torch_compat.dtensor.specs import own_part_of_index


def whole_numbers_in_parts() -> list[Change]:
    """Have the first rank hold all of the whole numbers that are to be pending as a sum, the others zeros.

    Stock gives each rank a share, which a tensor of whole numbers cuts off. Seen in 2.13 to 2.15.
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
