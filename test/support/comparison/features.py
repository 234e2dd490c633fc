"""Torch without distribution, with the plugin on: exports, transforms, modes, subclasses, operators of users."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from comparison.feature import FEATURES, Given
from comparison.outcome import End, compare, numbers

_THEMES = (
    "autograd",
    "compiling",
    "exporting",
    "modes",
    "modules",
    "subclasses",
    "transforms",
    "users",
)


def _known() -> dict[str, Any]:
    for theme in _THEMES:
        importlib.import_module(f"comparison.features_{theme}")
    return FEATURES


def names(part: str) -> list[str]:
    """A feature, and each way to compile where it compiles."""
    return [
        f"{name}-{backend}"
        for name, feature in _known().items()
        for backend in feature.backends
        if (backend == "code") == (part == "code")
    ]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Runs a feature: pairs of what was found and what is right."""
    import torch
    from comparison._torch import no_kernels

    known = _known()

    def run(program: str) -> End:
        name, backend = program.rsplit("-", 1)
        inductor = "inductor" if side == "stock" else "dynamo_dist"
        given = Given(inductor if backend in ("lowered", "code") else backend, side)
        torch._dynamo.reset()
        torch.manual_seed(0)
        seen: list[Any] = []
        with no_kernels() if backend == "lowered" else contextlib.nullcontext():
            for at, (found, expected) in enumerate(known[name].run(given)):
                if expected is None:
                    seen.append(found)
                elif problem := compare(found, expected, f"pair {at}", 1e-4):
                    return End("wrong", problem)
        return End("right", "", numbers(seen))

    return run
