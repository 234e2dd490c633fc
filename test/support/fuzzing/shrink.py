"""Cut a program down while it still fails in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from fuzzing.execute import Verdict
from fuzzing.program import Program, Statement


def shrink(
    program: Program, execute: Callable[[Program], Verdict], status: str, seconds: float = 60.0
) -> Program:
    """The smallest program found within ``seconds`` whose verdict has the same status."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if execute(smaller).status == status:
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the boldest cuts first."""
    for options in _fewer_options(program):
        yield dataclasses.replace(program, settings=options)
    for name in program.outputs:
        if len(program.outputs) > 1:
            yield program.cut(outputs=(name,))
    for name in program.outputs:
        if len(program.outputs) > 1:
            yield program.cut(outputs=tuple(other for other in program.outputs if other != name))
    if program.dynamic:
        yield program.cut(dynamic=False)
    if program.backward:
        inputs = tuple(dataclasses.replace(given, grad=False) for given in program.inputs)
        yield program.cut(backward=False, inputs=inputs)
    for at in reversed(range(len(program.statements))):
        yield from _without(program, at)
    if len(program.mesh) > 1 and not any("mesh_dim" in s.text for s in program.statements):
        yield program.cut(mesh=(program.mesh[0],))
    if program.kind != "graph" and program.ranks > 2:
        yield program.cut(mesh=(2,) * len(program.mesh))


def _without(program: Program, at: int) -> Iterator[Program]:
    """Without one statement: whoever reads it reads one of its operands, or goes too."""
    gone = program.statements[at]
    others = (*program.statements[:at], *program.statements[at + 1 :])
    if not gone.target:
        yield program.cut(statements=others)
        return
    for operand in gone.operands:
        kept = tuple(_renamed(statement, gone.target, operand) for statement in others)
        outputs = tuple(operand if name == gone.target else name for name in program.outputs)
        yield program.cut(statements=kept, outputs=tuple(dict.fromkeys(outputs)))


def _renamed(statement: Statement, old: str, new: str) -> Statement:
    operands = tuple(new if name == old else name for name in statement.operands)
    return dataclasses.replace(statement, operands=operands)


def _fewer_options(program: Program) -> Iterator[dict[str, object]]:
    """One set of options instead of several, and fewer passes."""
    settings = dict(program.settings)
    options = settings.get("options")
    if isinstance(options, list) and len(options) > 1:
        for each in options:
            yield {**settings, "options": [each]}
        return
    one = options[0] if isinstance(options, list) else options
    for name in (one or {}).get("passes", ()):
        fewer = {**one, "passes": [other for other in one["passes"] if other != name]}
        yield {**settings, "options": [fewer] if isinstance(options, list) else fewer}
