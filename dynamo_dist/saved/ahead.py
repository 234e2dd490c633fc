"""A process that compiles ahead of its job: what it saves goes where the command says, and ends the script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dynamo_dist.saved.manifest import Artefacts

_folder: list[str] = []


class Ended(SystemExit):
    """The script has compiled what the job needs; ``artefacts`` are what it saved. It leaves as by ``sys.exit()``."""

    def __init__(self, artefacts: Artefacts) -> None:
        super().__init__(0)
        self.artefacts = artefacts


def folder() -> str | None:
    """Return where this process' artefacts go; None where it is a job's own."""
    return _folder[-1] if _folder else None


@contextlib.contextmanager
def of_job(path: str) -> Iterator[None]:
    """In the block ``save`` writes to ``path``, whatever it is given, and raises Ended; ``load`` loads nothing."""
    _folder.append(path)
    try:
        yield
    finally:
        _folder.pop()
