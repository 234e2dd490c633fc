"""Nodes of a graph: what they call, and sizes of traced tensors."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Of the symbols of a ShapeEnv that have no hint: the value that is expected.
_expected: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def size_hint(size: int | torch.SymInt) -> int:
    """An int as it is; of a symbolic size the value seen while tracing, or what is expected of it
    (1 if nothing is).

    Seen in torch 2.11 to 2.15.
    """
    if isinstance(size, int):
        return size
    # A symbol of a traced input has the value that was seen. One that depends on data, as a count
    # of tokens, has none.
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else _expected_of(size)


def expect(size: object, value: int) -> None:
    """Let ``size_hint`` of a single symbol that has no hint be a value; the first that is
    expected stays.
    """
    if not isinstance(size, torch.SymInt) or getattr(size.node, "hint", None) is not None:
        return
    shape_env, symbol = getattr(size.node, "shape_env", None), size.node.expr
    if shape_env is not None and symbol.is_symbol:
        _expected.setdefault(shape_env, {}).setdefault(symbol, value)


def _expected_of(size: torch.SymInt) -> int:
    known = _expected.get(getattr(size.node, "shape_env", None))
    if not known:
        return 1
    expr = size.node.expr
    return int(expr.xreplace({symbol: known.get(symbol, 1) for symbol in expr.free_symbols}))


def new_symbols(value: object) -> Any:
    """Return where in a size or tensor the symbols lie that were made with it, as a node's
    ``unbacked_bindings``; None if none were.

    ``compute_unbacked_bindings`` and ``SymNode.shape_env`` were seen in torch 2.11 to 2.15.
    """
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings  # loads sympy

    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return None
    return compute_unbacked_bindings(cast(Any, symbolic).node.shape_env, value)


def hold(condition: object) -> None:
    """Tell torch that a condition on symbols holds; it is checked when the symbols have values."""
    torch._check(cast(Any, condition))


def as_number(size: int | torch.SymInt) -> int | torch.SymInt:
    """Return a size whose expression is a number as that. ``SymNode.expr`` was seen in torch
    2.11 to 2.15.
    """
    if isinstance(size, int) or not size.node.expr.is_number:
        return size
    return int(size.node.expr)


def surely_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Return whether two sizes are equal whatever their symbols are. Adds no guard.

    ``statically_known_true`` was seen in torch 2.11 to 2.15.
    """
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return statically_known_true(cast(Any, one == other))


def namespace(target: object) -> str | None:
    """Namespace of an operator or of one of its overloads, such as ``aten``; None for anything
    else.

    ``torch._ops`` was seen in 2.11 to 2.15.
    """
    if isinstance(target, OpOverload):
        return str(target.namespace)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name).partition("::")[0]
    return None


def overload_packet(target: object) -> OpOverloadPacket[..., Any] | None:
    """Return the operator of which a target is an overload; None for anything else.

    ``torch._ops`` was seen in 2.11 to 2.15.
    """
    return target.overloadpacket if isinstance(target, OpOverload) else None


def function_name(target: object) -> str:
    """Name of an operator or a function; the text of what has none."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def is_reduction(target: OpOverload[..., Any]) -> bool:
    """Return whether torch tags an overload as a reduction; false where torch has no such tag.

    ``Tag.reduction`` was seen in 2.13; not every supported torch has it.
    """
    tag = getattr(torch.Tag, "reduction", None)
    return tag is not None and tag in target.tags


def is_impure(node: fx.Node) -> bool:
    """Return whether a node has an effect beside its result; drawing random numbers is one.
    ``impure_random`` was seen in 2.13.
    """
    return is_random(node) or node.is_impure(impure_random=False)


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers; torch's attention without dropout draws none.
    ``Tag.nondeterministic_seeded`` was seen in 2.11 to 2.15.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = target._schema.arguments if target.namespace == "aten" else ()
    for place, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0)
    return True


def higher_order_name(target: object) -> str | None:
    """Name of a higher-order operator, such as ``flex_attention``; None for anything else. Seen
    in 2.11 to 2.15.
    """
    return str(target.__name__) if isinstance(target, HigherOrderOperator) else None


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a type whose operations are those of tensors in it, and
    others. Seen in 2.11 to 2.15.
    """
    return bool(is_traceable_wrapper_subclass(tensor))
