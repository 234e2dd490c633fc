"""What all kinds of random programs share: a pool of named values with their shapes, and
settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzzing.program import Input, Statement

from inductor_passes.registry import registered_passes

# How often each is drawn. Every rank compiles: what many ranks cost buys several programs on few.
_MESHES = {
    (2,): 8,
    (1, 2): 2,
    (3,): 2,
    (2, 2): 3,
    (4,): 1,
    (1, 2, 1): 1,
    (1, 2, 2): 1,
    (2, 2, 2): 0.5,
}


@dataclass
class Draft:
    """A program as it grows. ``shapes`` holds every value that a later line may use."""

    choose: Random
    inputs: list[Input] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)

    def give(self, given: Input) -> str:
        """Add an input."""
        self.inputs.append(given)
        self.shapes[given.name] = given.shape
        return given.name

    def name(self) -> str:
        return f"v{len(self.statements) + len(self.inputs)}"

    def add(
        self,
        text: str,
        operands: Sequence[str],
        shape: Sequence[int | str] | None,
        whole: str | None = "",
    ) -> str:
        """Add a line; with a ``shape`` its value is in the pool, without it is no tensor."""
        target = self.name()
        self.statements.append(Statement(target, text, tuple(operands), whole))
        if shape is not None:
            self.shapes[target] = tuple(shape)
        return target

    def effect(self, text: str, operands: Sequence[str], whole: str | None = "") -> None:
        """Add a line that changes one of its operands."""
        self.statements.append(Statement("", text, tuple(operands), whole))

    def any(self, *ndim: int) -> str:
        """A value, mostly a late one, of one of these numbers of dimensions."""
        found = [name for name, shape in self.shapes.items() if not ndim or len(shape) in ndim]
        return self.choose.choice(found[-4:] if self.choose.random() < 0.6 else found)

    def like(self, shape: Sequence[int | str]) -> str:
        """A value of this shape."""
        return self.choose.choice(
            [name for name, other in self.shapes.items() if other == tuple(shape)]
        )

    def outputs(self, most: int = 4) -> tuple[str, ...]:
        """Values that no line uses, and a few others."""
        used = {name for statement in self.statements for name in statement.operands}
        made = [
            statement.target for statement in self.statements if statement.target in self.shapes
        ]
        ends = [name for name in made if name not in used]
        others = [name for name in made if name in used]
        self.choose.shuffle(others)
        return tuple(dict.fromkeys([*ends[-most:], *others[:1]])) or tuple(self.shapes)[:1]


def meshes(choose: Random, costly: bool = False) -> tuple[int, ...]:
    """Sizes of a mesh, of one to three dimensions; of one mostly, where each dimension more is
    ``costly``.
    """
    mesh = choose.choices(list(_MESHES), list(_MESHES.values()))[0]
    return mesh if not costly or choose.random() < 0.2 else (choose.choice((2, 2, 3, 4)),)


def pass_options(choose: Random) -> dict[str, Any]:
    """Options of the passes: all of them, one alone, some, or a mode; by the default's times or
    a machine's.
    """
    topology = choose.choice(({}, {}, {"topology": "cpu-gloo"}, {"topology": "h100x8"}))
    return {**_selection(choose), **topology}


def _selection(choose: Random) -> dict[str, Any]:
    names = list(registered_passes())
    kind = choose.randrange(6)
    if kind == 0:
        return {}
    if kind == 1:
        return {"passes": [choose.choice(names)]}
    if kind == 2:
        return {"passes": sorted(choose.sample(names, choose.randint(2, len(names))))}
    if kind == 3:
        return {"disable": sorted(choose.sample(names, choose.randint(1, 4)))}
    if kind == 4:
        return {"exact": True}
    return {
        "schedule": choose.choice(
            # Five entries, so that a number draws what it drew before.
            ["off", "off", "off", {"extra_memory_ratio": 0.0}, {"bucket": False}]
        )
    }


def settings(choose: Random) -> dict[str, Any]:
    """Backend and options of a compile."""
    if choose.random() < 0.4:
        return {"backend": "aot_eager"}
    return {"backend": "dynamo_dist", "options": pass_options(choose)}
