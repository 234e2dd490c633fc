"""Which values share memory: views, in-place results, waits, and the parts of a several-output node.

Read off operator schemas, so it holds for any aten or custom op that declares its aliases truthfully.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from inductor_passes.collectives import is_wait

# Decomposed reshapes: no alias in the schema, yet Inductor lowers them to the same buffer.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view"})


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` only looks at its input's memory: no read, no write, no new bytes.

    A ``getitem`` is a view where it picks from views (``split``); a ``wait_tensor`` is not one here,
    because it marks a point in time.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target._opname in _UNDECLARED_VIEWS:
        return True
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that the node writes to; empty for a functional op."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(_nodes_of(_passed(node, position, argument.name)))
    return found


def alias_source(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node``'s value is, or is part of; None where the value is fresh."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        if not isinstance(source, fx.Node):
            return None
        listed = _aliased_nodes(source)
        in_place = len(listed) > 1 and isinstance(index, int) and index < len(listed)
        return listed[index] if in_place and isinstance(index, int) else source
    if is_wait(node):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    aliased = _aliased_nodes(node)
    return aliased[0] if len(aliased) == 1 else None


def _aliased_nodes(node: fx.Node) -> list[fx.Node]:
    """Inputs whose memory the node returns, in the order of its results."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args:
        return []
    if is_view(node):
        return _nodes_of(node.args[0])
    returned: set[str] = set()
    for result in target._schema.returns:
        if result.alias_info is not None:
            returned |= result.alias_info.before_set
    found: list[fx.Node] = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & returned:
            found.extend(_nodes_of(_passed(node, position, argument.name)))
    return found


def _passed(node: fx.Node, position: int, name: str) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _nodes_of(argument: object) -> list[fx.Node]:
    items = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [item for item in items if isinstance(item, fx.Node)]
