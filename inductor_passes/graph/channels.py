"""Second channels: process groups that were cloned so that two launches over the same peers can be on their way at once.

A clone shares its original's link: what one sends, the other cannot send meanwhile.
"""

from __future__ import annotations

from torch import fx

from inductor_passes.graph.collectives import group_name
from inductor_passes.torch_compat import c10d

_clones: dict[str, str] = {}  # name of a group -> name of its clone


def add(original: str, clone: str) -> None:
    """Let schedulers use ``clone``, a group of the ranks of ``original``, as its second channel."""
    _clones[original] = clone


def second(name: str) -> str | None:
    """Return the name of a group's clone; None if there is none whose ranks are still the group's."""
    clone = _clones.get(name)
    ranks = c10d.group_ranks(clone) if clone is not None else None
    return clone if ranks is not None and ranks == c10d.group_ranks(name) else None


def link_of(name: str) -> str:
    """Return the group whose link a group uses: its original, if it is a clone, else itself."""
    return next((original for original, clone in _clones.items() if clone == name), name)


def number(launch: fx.Node) -> int:
    """Return 2 for a launch on a second channel, else 1."""
    name = group_name(launch)
    return 1 if link_of(name) == name else 2


def known() -> dict[str, str]:
    """Return the clones that can be used now, by their originals."""
    return {name: clone for name in _clones if (clone := second(name)) is not None}


def forget() -> None:
    """Let no later compile use a clone. The groups stay: code that was compiled before may launch on them."""
    _clones.clear()
