"""A random program as data: it prints as Python, it can be cut down, and it draws its own
inputs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

ROWS = "n"  # in a shape: a size that is another one in the second call of a dynamic program


@dataclass(frozen=True, slots=True)
class Input:
    """``placements`` as Python text, or "" for a plain tensor; ``spread``: each rank has other
    values.

    ``shape`` is global for a DTensor. ``dtype`` is a name in torch; integers are small and
    positive.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float64"
    placements: str = ""
    spread: bool = False
    grad: bool = False

    def sizes(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if size == ROWS else int(size) for size in self.shape)

    def draw(self, seed: int, rank: int, rows: int) -> torch.Tensor:
        """Its values on a rank; the whole of a DTensor."""
        own = re.sub(r"\D", "", self.name) or "0"
        generator = torch.Generator().manual_seed(
            1000 * seed + 10 * int(own) + (rank + 1) * self.spread
        )
        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            return torch.randint(0, 5, self.sizes(rows), generator=generator, dtype=dtype)
        return torch.randn(self.sizes(rows), generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True, slots=True)
class Statement:
    """One line: ``{0}``, ``{1}`` in ``text`` stand for ``operands``, names of inputs or earlier
    targets.

    ``target`` is empty for a line that works by its effect. ``whole`` is the same line on one
    device, where it differs; None if there is none.
    """

    target: str
    text: str
    operands: tuple[str, ...] = ()
    whole: str | None = ""

    def line(self, whole: bool) -> str:
        text = (self.whole or self.text) if whole else self.text
        text = text.format(*self.operands)
        return f"{self.target} = {text}" if self.target else text


@dataclass(frozen=True, slots=True)
class Layer:
    """A submodule: its constructor and the part of a tensor-parallel plan for it, as Python
    text.
    """

    name: str
    text: str
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """``kind`` says how it is run (see ``execute``); ``mesh`` are its sizes; ``settings`` go to
    the compile.
    """

    kind: str
    seed: int
    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    backward: bool = False
    dynamic: bool = False
    layers: tuple[Layer, ...] = ()
    is_sharded: bool = False  # by FSDP2
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def cut(self, **changes: Any) -> Program:
        """The program with changes, without what nothing uses any more."""
        program = dataclasses.replace(self, **changes)
        used = set(program.outputs)
        kept: list[Statement] = []
        for statement in reversed(program.statements):
            if not statement.target or statement.target in used:
                used.update(statement.operands)
                kept.append(statement)
        text = " ".join(statement.text for statement in kept)
        return dataclasses.replace(
            program,
            statements=tuple(reversed(kept)),
            inputs=tuple(given for given in program.inputs if given.name in used),
            layers=tuple(each for each in program.layers if f"self.{each.name}(" in text),
        )

    def has_whole(self) -> bool:
        """Whether the program means something on one device."""
        return all(statement.whole is not None for statement in self.statements)

    def source(self, whole: bool = False) -> str:
        """``step(mesh, ...)``, or for a module ``build(mesh)`` besides; on one device with
        ``whole``.
        """
        names = ", ".join(given.name for given in self.inputs)
        body = [statement.line(whole) for statement in self.statements]
        body.append(f"return {', '.join(self.outputs)},")
        if not self.layers:
            return "\n    ".join([f"def step(mesh, {names}):", *body]) + "\n"
        lines = ["class Model(torch.nn.Module):", "    def __init__(self):"]
        lines.append("        super().__init__()")
        lines += [f"        self.{layer.name} = {layer.text}" for layer in self.layers]
        lines.append(f"    def forward(self, mesh, {names}):")
        lines += [f"        {line}" for line in body]
        lines += [
            "",
            "def build(mesh):",
            "    torch.manual_seed(0)",
            "    model = Model().double()",
        ]
        plans = [f"{layer.name!r}: {layer.plan}" for layer in self.layers if layer.plan]
        # Under both, the last dimension of the mesh is that of tensor parallelism.
        both = len(self.mesh) > 1 and bool(plans)
        data, tensor = ("mesh['d0']", "mesh['d1']") if both else ("mesh", "mesh")
        if not whole and plans:
            lines.append(f"    parallelize_module(model, {tensor}, {{{', '.join(plans)}}})")
        if not whole and self.is_sharded:
            lines.append(f"    fully_shard(model, mesh={data})")
        lines.append("    return model")
        return "\n".join(lines) + "\n"
