"""AOTAutograd: when a backward graph is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from inductor_passes.torch_compat import scoped


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile backward graphs with their forward ones, not when they are first needed.

    ``force_non_lazy_backward_lowering`` was seen in 2.11 to 2.15.
    """
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    if not hasattr(config, name):
        yield
        return
    with config.patch({name: True}):
        yield


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph that only its backward reads. The names ``tangents_...`` were seen in 2.11 to 2.15."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if str(node.target).startswith("tangents")]


def is_joint(graph: fx.Graph) -> bool:
    """Return whether a graph is of forward and backward together."""
    return bool(tangents(graph))


@contextlib.contextmanager
def merged_without(
    apart: Callable[[fx.Graph], set[Any]], *, again: Callable[[fx.Graph], bool]
) -> Iterator[None]:
    """Let AOTAutograd merge equal nodes of a joint graph in the block, but not calls of the operators ``apart``.

    Where ``again`` has changed what was merged, it is merged once more. ``partitioners.fx_graph_cse`` and
    ``compile_utils.rand_ops`` were seen in 2.11 to 2.15; where they are missing, stock's way stays.
    """
    from torch._functorch import compile_utils, partitioners

    if not hasattr(compile_utils, "rand_ops"):
        yield
        return

    def merging(stock: Callable[..., fx.Graph]) -> Callable[..., fx.Graph]:
        def merged(graph: fx.Graph, **how: Any) -> fx.Graph:
            before = compile_utils.rand_ops
            compile_utils.rand_ops = [*before, *apart(graph)]
            try:
                return stock(graph, **how)
            finally:
                compile_utils.rand_ops = before

        def changed(graph: fx.Graph, **how: Any) -> fx.Graph:
            found = merged(graph, **how)
            return merged(found, **how) if again(found) else found

        return changed

    with scoped.wrapped(partitioners, "fx_graph_cse", merging):
        yield


@contextlib.contextmanager
def before_partition(
    ask: Callable[[fx.GraphModule, dict[str, Any]], None],
) -> Iterator[None]:
    """Call ``ask`` with a joint graph that was traced in the block, and the arguments by name, before Inductor's passes see it.

    ``compile_fx.partition_fn`` was seen in 2.11 to 2.15; where it is missing, nobody asks.
    """
    from torch._inductor import compile_fx

    def asking(stock: Callable[..., Any]) -> Callable[..., Any]:
        def partition(gm: fx.GraphModule, *args: Any, **how: Any) -> Any:
            ask(gm, how)
            return stock(gm, *args, **how)

        return partition

    with scoped.wrapped(compile_fx, "partition_fn", asking):
        yield
