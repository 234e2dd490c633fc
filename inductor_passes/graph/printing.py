"""Print a graph as lines that people compare, and find the user's own line of a node."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from inductor_passes.torch_compat.nodes import function_name


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
    return function_name(target)


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


# What in ``node.meta`` says why a collective is there; whoever traces the program notes it.
CAUSE = "dist_cause"
# The code is missing where nobody can read the file, as of a cell or of what exec() ran.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)'
    r'(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?'
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Folders of code that stands between torch and an operator, in the place of code of torch.
_libraries: set[str] = set()


def add_library(file: str) -> None:
    """Take no line of the package that ``file`` is the ``__init__.py`` of for a user's."""
    _libraries.add(os.path.dirname(os.path.abspath(file)) + os.sep)


def user_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost user's frame that made the node; without one the module
    whose forward did, as ``module layers.0.up (Linear)``, or "".
    """
    return innermost_user_frame(node.stack_trace or "") or _module(node)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    # The path begins with how the program reaches the compiled module: ``L['self'].layers.0.up``.
    name = path.partition("].")[2] if path.startswith("L[") else path
    return f"module {name or path} ({getattr(kind, '__name__', kind)})"


def frames_of(node: fx.Node) -> list[re.Match[str]]:
    """The node's recorded stack, outermost first: ``file``, ``line``, ``function`` and ``code``
    of each frame.
    """
    return list(_FRAME.finditer(node.stack_trace or ""))


def cause(node: fx.Node) -> str:
    """Return the note made while the program was traced, such as a DTensor's change of
    placement, or "".
    """
    return str(node.meta.get(CAUSE, ""))


def innermost_user_frame(stack_trace: str) -> str:
    """The same of a formatted stack; without a user's frame torch's innermost one, or "" if all
    frames are of libraries.
    """
    frames = _FRAME.finditer(stack_trace)
    known = [frame for frame in frames if not frame["file"].startswith(tuple(_libraries))]
    own = [frame for frame in known if not frame["file"].startswith(_TORCH)]
    if not known:
        return ""
    frame = (own or known)[-1]
    code = (frame["code"] or "").strip()
    return f"{frame['file']}:{frame['line']}{code and f': {code}'}"
