"""One way for all ranks to run a wrapper's forward: whole in a graph, or in eager mode.

Eager FSDP2 and DDP launch other collectives than a graph does. So before a graph that holds such a forward is first
compiled, its ranks hear of one another through the job's store; where one of them cannot, none does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dynamo_dist.config import agreement_seconds
from dynamo_dist.errors import CannotFollowError
from dynamo_dist.job.votes import all_can


@dataclass
class _Wrapper:
    """``text``: the same on all ranks. ``whole``: the way that was chosen; None before."""

    text: str
    ranks: Sequence[int]
    whole: bool | None = None
    changes: int = 0


_known: WeakKeyDictionary[Any, _Wrapper] = WeakKeyDictionary()
_alike: Counter[str] = Counter()


def name(wrapper: Any, parameters: Sequence[tuple[Any, ...]], ranks: Sequence[int]) -> str:
    """Return the name of a wrapper: by its parameters, and by how many like it this process has met before.

    ``parameters`` says of each what is the same on all ranks: groups along one dimension of a mesh have names of
    their own, and rows may be uneven.
    """
    if wrapper not in _known:
        text = hashlib.sha256(repr(list(parameters)).encode()).hexdigest()[:16]
        _known[wrapper] = _Wrapper(f"{text}/{_alike[text]}", ranks)
        _alike[text] += 1
    return _known[wrapper].text


def is_whole(wrapper: Any, can: bool) -> bool:
    """Return whether the ranks of a wrapper run its forward whole, given whether this one can.

    Asks them once; a rank that could and no longer can, because of a graph break that it meets later, asks them for
    the other way. Raises CannotFollowError where they go on as before.
    """
    mine = _known[wrapper]
    if mine.whole is None:
        mine.whole = all_can(f"{mine.text} whole", mine.ranks, can, agreement_seconds())
    elif mine.whole and not can:
        mine.changes += 1
        way = f"{mine.text} eager {mine.changes}"
        if not all_can(way, mine.ranks, True, agreement_seconds()):
            raise CannotFollowError(
                f"A graph break has come into the forward of {type(wrapper).__name__}, which the job runs in one graph.",
                "In eager mode its gathers and averages are launched in other sizes than the other ranks' graphs launch them.",
                "Keep what breaks out of the forward, or have it on all ranks from the start.",
            )
        mine.whole = False
    return mine.whole and can
