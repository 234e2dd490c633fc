"""Numbers that all ranks of a job shall use, or none: what each measured, made one by one rank, adopted by one word.

Rank 0 makes one text of what all have put down, and writes the word that it holds. Who waits in vain writes that it does
not, if nothing is written yet; what stands there counts for all. So a rank that dies leaves the others as they were, and one
that cannot read the word does not know what they do: it must not go on as if it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inductor_passes.agree.store import (
    Await,
    ReadAll,
    Steps,
    StoreFailedError,
    Swap,
    Write,
    read,
)

_ADOPTED, _NOT, _FAILED = "adopted", "not: ", "failed: "


@dataclass(frozen=True, slots=True)
class Shared:
    """``text``: what all ranks use; None where they do not, and ``why``."""

    text: str | None
    why: str = ""


def share(
    me: int, world: int, name: str, mine: str, make: Callable[[Mapping[int, str]], str]
) -> Steps[Shared]:
    """Share ``mine`` with all ranks under ``name``, which no other call of the job bears.

    ``make``: one text of all ranks' ones, for rank 0 to call; a ValueError that it raises says why there is none. Raises
    StoreFailedError if the others may use a text that this rank cannot read.
    """
    yield Write(((f"share/{name}/of/{me}", mine),))
    word = (yield from _made(world, name, make)) if me == 0 else ""
    if not word:
        came = yield Await(f"share/{name}/word")
        word = yield from read(f"share/{name}/word")
        if not came and not word:
            word = yield from _say(name, f"{_NOT}rank 0 did not answer")
    if word != _ADOPTED:
        return Shared(None, word.removeprefix(_NOT))
    found = yield ReadAll((f"share/{name}/all",))
    if found is None:
        raise StoreFailedError(f"what ranks share as {name!r} is adopted and not there")
    return Shared(found[0])


def fail(me: int, name: str, why: str) -> Steps[None]:
    """Tell the others that this rank has nothing to share, so that none waits for it."""
    yield Write(((f"share/{name}/of/{me}", f"{_FAILED}{why}"),))
    yield from _say(name, f"{_NOT}rank {me}: {why}")


def _made(world: int, name: str, make: Callable[[Mapping[int, str]], str]) -> Steps[str]:
    of_ranks: dict[int, str] = {}
    for rank in range(world):
        if not (yield Await(f"share/{name}/of/{rank}")):
            return (yield from _say(name, f"{_NOT}rank {rank} did not come in time"))
        (text,) = yield ReadAll((f"share/{name}/of/{rank}",))
        if text.startswith(_FAILED):
            return (yield from _say(name, f"{_NOT}rank {rank}: {text.removeprefix(_FAILED)}"))
        of_ranks[rank] = text
    try:
        made = make(of_ranks)
    except ValueError as error:
        return (yield from _say(name, f"{_NOT}{error}"))
    yield Write(((f"share/{name}/all", made),))
    return (yield from _say(name, _ADOPTED))


def _say(name: str, word: str) -> Steps[str]:
    """Write the word, unless one is written; returns the one that holds."""
    held: str = yield Swap(f"share/{name}/word", "", word)
    return held
