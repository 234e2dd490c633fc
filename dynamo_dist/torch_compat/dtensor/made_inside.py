"""Plain tensors that an operator makes inside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.utils as _dynamo_utils
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat.changes import Change, WrapAttribute
from dynamo_dist.torch_compat.dtensor.calls import tree_leaves


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
    interpreter. Seen in 2.13 to 2.15.
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
