"""Values that share memory: views, in-place results, waits, and the parts of a several-output node.

Read off operator schemas, so it holds for any aten or custom op that declares its aliases
truthfully.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from inductor_passes.graph.collectives import is_wait, is_wait_operator, tensor_bytes

Fact = TypeVar("Fact")

# Decomposed reshapes: no alias in the schema, yet Inductor lowers them to the same buffer.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view"})
# Of the bytes of all results, where one of them stands for the operator's memory.
_NEARLY_ALL = 7 / 8


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts about memory in an operator's schema: arguments by position and name."""

    view: bool = False
    aliased: tuple[tuple[int, str], ...] = ()
    mutated: tuple[tuple[int, str], ...] = ()


_NO_FACTS = OpFacts()


def per_operator(fact: Callable[[object], Fact]) -> Callable[[object], Fact]:
    """Remember a fact of each operator. By identity: hashing an ``OpOverload`` is slow, and
    frequent.
    """
    known: dict[int, tuple[object, Fact]] = {}

    @functools.wraps(fact)
    def remembered(target: object) -> Fact:
        entry = known.get(id(target))
        if entry is None:
            # Keeping the operator keeps its id from being given to another.
            entry = known[id(target)] = (target, fact(target))
        return entry[1]

    return remembered


@per_operator
def op_facts(target: object) -> OpFacts:
    """Facts of one operator, read once. What is no operator shares and changes nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return _NO_FACTS
    arguments = [(p, a.name, a.alias_info) for p, a in enumerate(target._schema.arguments)]
    infos = [result.alias_info for result in target._schema.returns]
    # All results alias an argument and none is written: the schema's definition of a view. In-place
    # operators alias too, with a write.
    view = bool(infos) and all(info is not None and not info.is_write for info in infos)
    view = view and not is_wait_operator(target)  # it marks a point in time
    mutated = tuple((p, name) for p, name, info in arguments if info and info.is_write)
    # A view shows its first argument, by torch's convention for all view operators.
    if view or target._opname in _UNDECLARED_VIEWS:
        return OpFacts(True, ((0, arguments[0][1]),), mutated)
    # Aliases are matched by their letter in the schema, as ``a`` in ``Tensor(a!)``.
    returned = {alias for info in infos if info for alias in info.before_set}
    aliased = tuple((p, name) for p, name, info in arguments if info and info.before_set & returned)
    return OpFacts(False, aliased, mutated)


def is_view(node: fx.Node) -> bool:
    """Return whether ``node`` only looks at its input's memory: no read, no write, no new bytes.

    A ``getitem`` is a view where it picks from views (``split``); a ``wait_tensor`` is not one
    here, because it marks a point in time.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return op_facts(node.target).view


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that the node writes to; empty for a functional op."""
    mutated = op_facts(node.target).mutated
    return _passed(node, mutated) if mutated else []


def alias_source(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node``'s value is, or is part of; None where the value is fresh."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        if not isinstance(source, fx.Node) or is_small_result(node):
            return None
        listed = _passed(source, op_facts(source.target).aliased)
        # An operator that works in place on a list returns the list: result k is the k-th tensor
        # that was passed.
        if len(listed) > 1 and isinstance(index, int) and index < len(listed):
            return listed[index]
        return source
    aliased = op_facts(node.target).aliased
    if aliased:
        shared = _passed(node, aliased)
        # With several candidates nobody knows which: the value then counts as fresh memory.
        return shared[0] if len(shared) == 1 else None
    # ``wait_tensor`` returns its argument, though its schema declares no alias.
    if is_wait(node):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def is_small_result(node: fx.Node) -> bool:
    """Return whether a ``getitem`` picks a result beside one that is nearly all that its operator
    makes, as attention's sums of exponentials are.

    It has memory of its own then, and the large one counts as the operator's. Results of like size
    count as one: an operator makes all at once, and each ``getitem`` stands behind it.
    """
    return node.target is operator.getitem and main_result(node.args[0]) not in (None, node.args[1])


def main_result(node: object) -> int | None:
    """Return which result of an operator is nearly all of its memory; None where none is, or where
    results may share memory.
    """
    if not isinstance(node, fx.Node) or not _makes_several(node.target):
        return None
    results = node.meta.get("val")
    if not isinstance(results, tuple):
        return None
    sizes = [tensor_bytes(each) if isinstance(each, torch.Tensor) else 0 for each in results]
    return sizes.index(max(sizes)) if max(sizes) >= _NEARLY_ALL * sum(sizes) else None


@per_operator
def _makes_several(target: object) -> bool:
    """Return whether an operator returns several tensors, each with memory of its own."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) > 1 and all(result.alias_info is None for result in returns)


def written_to_input(node: fx.Node) -> fx.Node | None:
    """Return what a node copies into an input of the graph, as its new value; None for others."""
    if node.target is not torch.ops.aten.copy_.default:
        return None
    target, value = node.args[:2]
    is_input = isinstance(target, fx.Node) and target.op == "placeholder"
    return value if is_input and isinstance(value, fx.Node) else None


def _passed(node: fx.Node, arguments: Iterable[tuple[int, str]]) -> list[fx.Node]:
    """The nodes that stand at some arguments of a call, lists laid out."""
    found: list[fx.Node] = []
    for position, name in arguments:
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        found.extend(_nodes_of(given))
    return found


def _nodes_of(argument: object) -> list[fx.Node]:
    items = argument if isinstance(argument, (list, tuple)) else (argument,)
    return [item for item in items if isinstance(item, fx.Node)]
