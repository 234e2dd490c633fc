"""Sizes of views of DTensors that come into a graph."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.output_graph as _output_graph
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.variables.builder import GraphArg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def sizes_of_bases_are_inputs() -> list[Change]:
    """With dynamic sizes, a graph takes the sizes of a view's base where those of the view are made of several.

    A view of a DTensor comes in as its base and what was done to that, so that ``x.view(-1)`` has the product of two
    sizes that are no sizes of it; Dynamo asserts that each is one. Seen in torch 2.13 to 2.15.
    """

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def lift(self: Any, value: Any, source: Any) -> None:
            if self.parent is None and isinstance(value, torch.Tensor):
                for number in _numbers(value):
                    _bind_each(self, number)
            stock(self, value, source)

        return lift

    def counted(stock: Any) -> Any:
        @functools.wraps(stock)
        def free_symbols(value: Any) -> Any:
            found = stock(value)
            if is_traceable_wrapper_subclass(value):
                inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                tensors = [each for each in inner if isinstance(each, torch.Tensor)]
                symbols = [
                    number.node.expr.free_symbols for each in tensors for number in _numbers(each)
                ]
                found = {*found, *itertools.chain(*symbols)}
            return found

        return free_symbols

    return [
        WrapAttribute(SubgraphTracer, "_lift_basic_symbols", changed),
        # By which inputs are dropped that nobody reads.
        WrapAttribute(_output_graph, "free_symbols", counted),
    ]


def _numbers(tensor: torch.Tensor) -> Iterator[torch.SymInt]:
    strided = tensor.layout is torch.strided
    found = (*tensor.size(), *(tensor.stride() if strided else ()))
    for number in (*found, tensor.storage_offset()) if strided else found:
        if isinstance(number, torch.SymInt) and not number.node.expr.is_symbol:
            yield number


def _bind_each(tracer: Any, number: torch.SymInt) -> None:
    shape_env = number.node.shape_env
    for symbol in sorted(tracer.lookup_unbound_symbols(number), key=str):
        sources = shape_env.var_to_sources.get(symbol)
        if not sources:
            continue
        hint = shape_env.backed_var_to_val[symbol]
        size = shape_env.create_symintnode(symbol, hint=int(hint), source=sources[0])
        node = tracer.create_graph_input(
            str(symbol), type(size), size, before=True, source=sources[0]
        ).node
        node.meta["grapharg"] = GraphArg(
            sources[0], size, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False
        )
