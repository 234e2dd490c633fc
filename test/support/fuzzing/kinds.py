"""The kinds of programs: how each is drawn and run, and how often."""

from __future__ import annotations

import dataclasses
from random import Random

from fuzzing import c10d, dtensors, execute, graphs, modules, passes
from fuzzing.execute import Verdict
from fuzzing.program import Program

DRAW = {"graph": graphs.draw, "c10d": c10d.draw, "dtensor": dtensors.draw, "module": modules.draw}
# Of a hundred. A program for the passes alone costs a tenth of one that is compiled on every rank.
SHARES = {"graph": 86, "c10d": 6, "dtensor": 7, "module": 1}
CODE_SHARE = 60  # one in so many of the compiled ones goes through Inductor's code generation too


def draw(seed: int, kind: str | None = None) -> Program:
    """The program of this number, of the given kind or of the kind that its number gives it."""
    choose = Random(f"kind {seed}")
    kind = kind or choose.choices(list(SHARES), list(SHARES.values()))[0]
    program = DRAW[kind](seed)
    if kind != "graph" and choose.randrange(CODE_SHARE) == 0:
        settings = {"backend": "dynamo_dist", **program.settings, "code": True}
        program = dataclasses.replace(program, settings=settings)
    return program


def run(program: Program) -> Verdict:
    """The verdict on a program."""
    return passes.execute(program) if program.kind == "graph" else execute.execute(program)
