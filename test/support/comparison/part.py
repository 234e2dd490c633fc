"""A part of the programs: what they are called, and how one of them is run in a process."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SIDES = ("stock", "ours")
Run = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """``module`` has ``names()`` and ``prepare(side)``, which returns what runs a program by its name.

    quick: the names of the quick run. seconds: a program that takes longer is lost. lives: a process is
    replaced after so many programs. theirs: the programs are code of others.
    """

    name: str
    module: str
    what: str
    quick: Sequence[str] = ()
    seconds: float = 60.0
    lives: int = 100
    theirs: bool = False

    def names(self) -> list[str]:
        return list(importlib.import_module(self.module).names(self.name))


def working(name: str, module: str, side: str) -> Run:
    """Called once in each process of ``workers.run``: the plugin on for ours, and never imported for stock."""
    os.environ.setdefault("DYNAMO_DIST_AGREEMENT_SECONDS", "20")
    if not os.environ.get("PARITY_LOUD"):
        sys.stdout = sys.stderr = open(
            os.devnull, "w"
        )  # what torch has to say of programs it refuses
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)
    if side == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    run = importlib.import_module(module).prepare(name, side)

    def one(program: str) -> dict[str, Any]:
        from comparison.outcome import end_of

        try:
            end = run(program)
        except Exception as error:
            if os.environ.get("PARITY_LOUD"):
                import traceback

                traceback.print_exc()
            end = end_of(error)
        gc.collect()
        return end.to_json()  # type: ignore[no-any-return]

    return one
