"""Make, replace and erase nodes so that every node keeps a true fake value and its user's line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from inductor_passes.errors import InvariantError
from inductor_passes.graph.numbers import JOINT, MEMBERS
from inductor_passes.graph.source_lines import CAUSE

aten = torch.ops.aten
prims = torch.ops.prims
CAST = prims.convert_element_type.default
# What a new node inherits from the one it stands for: the user's line and where Dynamo saw it.
INHERITED = (
    "stack_trace",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "partitioner_tag",
    "original_aten",
    "custom",
    CAUSE,
    MEMBERS,
    JOINT,
)
# Ops that only place elements, each of them somewhere: they commute with everything elementwise.
PLACING = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)


def value(node: fx.Node) -> Any:
    """The fake value of a node: a tensor, or a tuple of them; shapes are local."""
    return node.meta.get("val")


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node; None if there is no single one."""
    found = value(node) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def static_shape(node: object) -> tuple[int, ...] | None:
    """The local shape, if it holds no symbol."""
    found = tensor(node)
    if found is None or not all(isinstance(size, int) for size in found.shape):
        return None
    return tuple(found.shape)


def emit(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: fx.Node,
    kwargs: Mapping[str, Any] | None = None,
    value_of: Callable[[fx.Node], Any] | None = None,
) -> fx.Node:
    """Call ``target`` at the graph's insertion point, in the name of ``like``; ``value_of``: what finds its value."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})
    node.meta["val"] = (value_of or computed)(node)
    return node


def computed(node: fx.Node) -> Any:
    """The fake value that a node's op makes of the values of its inputs."""
    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def replace(old: fx.Node, new: fx.Node, name: str) -> None:
    """Let every user of ``old`` read ``new``. Raises InvariantError unless shape and dtype agree."""
    was, now = tensor(old), tensor(new)
    if was is None or now is None or was.dtype != now.dtype or was.shape != now.shape:
        raise InvariantError(
            f"The pass {name} replaced %{old.name} by something else: {_described(was)} by {_described(now)}.",
            "",
            f"Leave it out with options={{'disable': ['{name}']}}.",
        )
    old.replace_all_uses_with(new)


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase these nodes, and what only they read, as far as nobody reads them."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.users or node.op != "call_function" or node._erased:
            continue
        sources = list(node.all_input_nodes)
        graph.erase_node(node)
        pending.extend(source for source in sources if _is_pure(source))


def chain_above(node: object, through: frozenset[Any] = PLACING) -> list[fx.Node]:
    """``node``, its input, the input of that ... as long as ops of ``through`` lead up; the source last."""
    found: list[fx.Node] = []
    while isinstance(node, fx.Node):
        found.append(node)
        if node.op != "call_function" or node.target not in through:
            break
        node = node.args[0]
    return found


def again(graph: fx.Graph, chain: Sequence[fx.Node], source: fx.Node) -> fx.Node:
    """Redo the ops of ``chain``, the last first, on ``source``; returns what stands for ``chain[0]``."""
    for node in reversed(chain):
        source = emit(graph, node.target, (source, *node.args[1:]), node, node.kwargs)  # type: ignore[arg-type]
    return source


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.is_impure()


def _described(value: torch.Tensor | None) -> str:
    return "no tensor" if value is None else f"{value.dtype} {list(value.shape)}"
