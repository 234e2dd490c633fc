"""Modules that have moved: the old name of one says its new name, for one version.

Names that the documents gave to users go on working. ``moved.txt`` beside each package's ``__init__`` has a line
for each module: old name, new name, and ``kept`` where the old one still works.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class Finder(MetaPathFinder):
    """Asked by Python for the modules that no other finder has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the loader of a kept name. Raises ImportError for the old name of a private module."""
        package = name.partition(".")[0]
        if package not in ("inductor_passes", "dynamo_dist"):
            return None
        new, kept = _moved(package).get(name, ("", False))
        if kept:
            return ModuleSpec(name, _Kept(new), is_package=True)
        if new:
            raise ImportError(
                f"{name} is now {new}. It is no public module, and may move again.", name=name
            )
        return None


class _Kept(Loader):
    """A module under its old name: every attribute is the new one's."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        real = importlib.import_module(self.new)
        vars(module).update(__doc__=real.__doc__, __getattr__=lambda name: getattr(real, name))


@cache
def _moved(package: str) -> dict[str, tuple[str, bool]]:
    lines = (Path(__file__).parents[1] / package / "moved.txt").read_text().splitlines()
    return {
        old: (new, rest == ["kept"])
        for old, new, *rest in (line.split() for line in lines if line and line[0] != "#")
    }


def install() -> None:
    """Let Python ask; no module that is there is found otherwise than before."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
