"""A graph as lines that people compare, one a node."""

from __future__ import annotations

import torch
from torch import fx


def dump(graph: fx.Graph) -> str:
    """One line a node, ``name: [local shape] = op(arguments)``; the last line is what is returned.

    Namespaces, overloads, dtypes and strides are left out: these lines are for people to compare.
    """
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_format(node.args[0])}")
            continue
        line = node.name + _shape(node.meta.get("val"))
        if node.op == "get_attr":
            line += f" = self.{node.target}"
        elif node.op != "placeholder":
            arguments = [_format(arg) for arg in node.args]
            arguments += [f"{name}={_format(arg)}" for name, arg in node.kwargs.items()]
            line += f" = {_op_name(node)}({', '.join(arguments)})"
        lines.append(line)
    return "\n".join(lines)


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._opname
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _shape(value: object) -> str:
    if value is None:
        return ""
    return f": {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "[" + ", ".join(str(size) for size in value.shape) + "]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_value(item) for item in value) + ")"
    return str(value)


def _format(arg: object) -> str:
    if isinstance(arg, list):
        return "[" + ", ".join(_format(item) for item in arg) + "]"
    if isinstance(arg, tuple):
        return "(" + ", ".join(_format(item) for item in arg) + ")"
    return str(arg)
