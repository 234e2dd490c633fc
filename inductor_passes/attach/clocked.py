"""Generated code with clocks around its launches, waits and kernels, put in the place of the code itself for a while.

Only Python code is clocked, on whose lines the events are found that ``generated_code.py`` reads: the function keeps
its kernels, constants and callers, and gets its own code back. Steps that are not timed run what they ran before.
"""

from __future__ import annotations

import ast
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from inductor_passes.attach.generated_code import events_by_line

# Of the launches of a step that is timed: ``alone`` waits for each at once, ``scheduled`` where the code does.
Way = Literal["alone", "scheduled"]
_OPEN, _CLOSE, _NOW, _WAIT = (
    f"_inductor_passes_clock_{n}" for n in ("open", "close", "now", "wait")
)
_MARKS, _RESULT = "_inductor_passes_marks", "_inductor_passes_result"


@dataclass(slots=True)
class ClockedCode:
    """One function of generated code.

    ``events``: of its lines, in order (``read_order``). ``calls``: of each call since ``start``: seconds of one clock
    at its beginning, before and after each event, and at its end.
    """

    function: types.FunctionType
    events: tuple[str, ...]
    alone: types.CodeType
    scheduled: types.CodeType
    calls: list[list[float]] = field(default_factory=list)
    _own: types.CodeType | None = None

    def start(
        self,
        way: Way,
        ended: Callable[[list[float]], None] | None = None,
        opened: Callable[[], list[float]] = list,
    ) -> None:
        """Clock every call from now on. ``ended`` is called as one ends, with its marks, and may stop the clocks.

        ``opened`` makes the list that a call's marks are appended to.
        """
        self._own = self._own or self.function.__code__

        def close(marks: list[float]) -> None:
            self.calls.append(marks)
            if ended is not None:
                ended(marks)

        self.function.__globals__.update(
            {_OPEN: opened, _CLOSE: close, _NOW: time.perf_counter, _WAIT: _wait}
        )
        self.function.__code__ = self.alone if way == "alone" else self.scheduled

    def stop(self) -> list[list[float]]:
        """Give the function its code back; returns the calls since the last ``stop``."""
        if self._own is not None:
            self.function.__code__, self._own = self._own, None
            for name in (_OPEN, _CLOSE, _NOW, _WAIT):
                self.function.__globals__.pop(name, None)
        calls, self.calls = self.calls, []
        return calls


def clocked(call: Callable[..., Any], source: str) -> ClockedCode | None:
    """Clocks for what runs a compiled graph, whose Python is ``source``; None where there is nothing to clock.

    That is code without a launch, in C++, or of a form that is not known.
    """
    function = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType) or function.__code__.co_freevars:
        return None
    found = {line: (event, written) for line, event, written in events_by_line(source)}
    definition = _definition(source, function)
    if definition is None:
        return None
    lines = range(definition.lineno, (definition.end_lineno or definition.lineno) + 1)
    events = tuple(event for line, (event, _) in found.items() if line in lines)
    if not any(event.startswith("launch") for event in events):
        return None
    codes = []
    for waits in (True, False):
        tree = _definition(source, function)
        assert tree is not None
        if _put_clocks(tree, found, waits=waits) != len(events):
            return None
        codes.append(_code(tree, function))
    alone, scheduled = codes
    return ClockedCode(function, events, alone, scheduled)


def _definition(source: str, function: types.FunctionType) -> ast.FunctionDef | None:
    """The definition of a function in its module's source, as nodes of a tree of its own."""
    wanted = function.__name__, function.__code__.co_firstlineno
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:
        return None
    defined = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return next((node for node in defined if (node.name, node.lineno) == wanted), None)


def _put_clocks(
    definition: ast.FunctionDef, found: Mapping[int, tuple[str, tuple[str, ...]]], *, waits: bool
) -> int:
    """Put clocks around the events of a function; returns around how many."""
    count = 0

    def body(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        nonlocal count
        for statement in statements:
            event, written = found.get(statement.lineno, ("", ()))
            if isinstance(statement, ast.Return):
                value = statement.value or ast.Constant(None)
                yield ast.Assign([ast.Name(_RESULT, ast.Store())], value)
                yield from _statements(f"{_MARKS}.append({_NOW}()); {_CLOSE}({_MARKS})")
                yield ast.Return(ast.Name(_RESULT, ast.Load()))
            elif isinstance(statement, ast.With):
                statement.body = list(body(statement.body))
                yield statement
            elif event and statement.lineno == statement.end_lineno:
                count += 1
                yield from _statements(f"{_MARKS}.append({_NOW}())")
                yield statement
                if waits and written and event.startswith("launch"):
                    yield from _statements(f"{_WAIT}({', '.join(written)})")
                yield from _statements(f"{_MARKS}.append({_NOW}())")
            else:
                yield statement

    opened = _statements(f"{_MARKS} = {_OPEN}(); {_MARKS}.append({_NOW}())")
    definition.body = [*opened, *body(definition.body)]
    return count


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _code(definition: ast.FunctionDef, function: types.FunctionType) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([definition], []))
    made = compile(module, function.__code__.co_filename, "exec")
    return next(
        each
        for each in made.co_consts
        if isinstance(each, types.CodeType) and each.co_name == function.__name__
    )


def _wait(*values: object) -> None:
    """Wait for what a launch writes into. To wait again, where the code does, does nothing."""
    for value in values:
        if isinstance(value, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor.default(value)
        elif isinstance(value, (list, tuple)):
            _wait(*value)
