"""Rows of the table: short programs on DTensors, registered by name, and what they are made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

ROWS: dict[str, Row] = {}
SECTIONS = (
    "masks",
    "aliases",
    "maps",
    "optimizers",
    "data_dependent",
    "autograd",
    "objects",
    "creation",
    "training",
    "attention",
    "mixed",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One program. ``build(mesh, rank)`` gives a function and its arguments, or a list of those of
    several calls.

    ``ranks``: on how many; ``sizes`` of the mesh. ``trained``: a backward follows each call.
    ``backend``: "lowered" through Inductor, "traced" up to AOTAutograd alone. ``truth``: "plugin"
    where torch's eager mode takes a rank's part for the whole or hangs, "none" where it ends the
    process.
    """

    name: str
    section: str
    says: str
    build: Callable[..., tuple[Callable[..., Any], Any]]
    sizes: tuple[int, ...]
    trained: bool
    dynamic: bool | None
    backend: str
    truth: str

    @property
    def ranks(self) -> int:
        """The ranks of the mesh."""
        return torch.Size(self.sizes).numel()


def row(
    *sizes: int,
    trained: bool = True,
    dynamic: bool | None = None,
    backend: str = "lowered",
    truth: str = "eager",
) -> Callable[..., Any]:
    """Register a function under its name; its docstring is the row's text."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        name, section = build.__name__, build.__module__.rsplit(".", 1)[-1]
        assert name not in ROWS, name
        says = " ".join((build.__doc__ or "").split())
        ROWS[name] = Row(
            name, section, says, build, sizes or (2,), trained, dynamic, backend, truth
        )
        return build

    return register


def known() -> dict[str, Row]:
    """Every row by its name, in the order of the table."""
    for section in SECTIONS:
        importlib.import_module(f"comparison.in_graphs.{section}")
    return {
        each.name: each for section in SECTIONS for each in ROWS.values() if each.section == section
    }


def titles() -> dict[str, str]:
    """Headings by section: the first line of each module."""
    known()
    modules = {name: importlib.import_module(f"comparison.in_graphs.{name}") for name in SECTIONS}
    return {name: (each.__doc__ or "").splitlines()[0] for name, each in modules.items()}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that are the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def own(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of this rank's own."""
    return drawn(*shape, seed=100 * seed + rank + 1)


def laid_out(
    mesh: Any, placements: Sequence[Placement], *shape: int, seed: int = 0, grad: bool = True
) -> DTensor:
    """Those of ``drawn`` as a DTensor, a leaf."""
    found = distribute_tensor(drawn(*shape, seed=seed), mesh, list(placements))
    return found.requires_grad_(grad)  # type: ignore[return-value]


def ids(*values: int) -> torch.Tensor:
    """Whole numbers, as indices and labels are."""
    return torch.tensor(values)
