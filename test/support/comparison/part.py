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

SIDES = ("upstream", "ours")
Run = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """``module`` has ``names(part)`` and ``prepare(part, side)``, which returns what runs a program
    by its name.

    on_ranks: real ranks run the programs; ``module`` has ``mesh_of(part, name)`` and
        ``on_rank(part, name, side, rank)``.
    quick: the names of the quick run. seconds: a program that takes longer is lost. lives: a
        process is replaced after so many programs. theirs: the programs are code of others.
        explained: a program may fail where it says what is not done, and not otherwise.
    """

    name: str
    module: str
    what: str
    quick: Sequence[str] = ()
    seconds: float = 60.0
    lives: int = 100
    theirs: bool = False
    explained: bool = False
    on_ranks: bool = False

    def load(self) -> Any:
        """The module."""
        return importlib.import_module(self.module)

    def names(self) -> list[str]:
        return list(self.load().names(self.name))


def working(part: Part, side: str) -> Run:
    """Called once in each process of ``workers.run``: the plugin on for ours, and never imported
    for upstream.
    """
    os.environ.setdefault("INDUCTOR_PASSES_AGREEMENT_SECONDS", "20")
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
    run = part.load().prepare(part.name, side)

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
