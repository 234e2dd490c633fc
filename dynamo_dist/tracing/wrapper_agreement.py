"""Ranks agree, through the job's store, on one way to run a wrapper's forward: in one graph, or
eagerly.

Eager FSDP2 and DDP launch other collectives than a graph does. So the ranks of a graph that holds
such a forward vote, through the job's store, before the graph is first compiled. If one of them
cannot compile it so, none does.

The first rank to vote waits for the others, until a deadline. After the deadline all ranks run the
forward eagerly: the verdict stays in the store, and ranks that vote later find it there.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dynamo_dist.errors import CannotFollowError
from dynamo_dist.settings import agreement_seconds
from inductor_passes.torch_compat import c10d

log = logging.getLogger(__name__)

ALL, NOT_ALL, DIFFERENT = "all", "not all", "different"


def all_can(what: str, ranks: Sequence[int], can: bool, deadline_s: float) -> bool:
    """Return whether every rank of ``ranks`` can do ``what``; see ``vote``."""
    return vote(what, ranks, can, deadline_s) == ALL


def vote(what: str, ranks: Sequence[int], can: bool, deadline_s: float, how: str = "") -> str:
    """Return ALL if every rank of ``ranks`` can do ``what``, a text that is the same on all of
    them.

    Each of them calls it once for a text. A rank that cannot ends the waiting of the others:
    NOT_ALL. The result is NOT_ALL too if some do not vote within ``deadline_s``, or the store
    fails. It is DIFFERENT if ranks that can give different values of ``how``. Where there is one
    process, or nothing to wait for (``deadline_s`` 0), this one decides alone.
    """
    store = c10d.job_store()
    if store is None or len(ranks) < 2 or deadline_s <= 0:
        return ALL if can else NOT_ALL
    key = f"dynamo_dist/votes/{hashlib.sha256(f'{what} {sorted(ranks)}'.encode()).hexdigest()}"
    try:
        # The first verdict stays: compare_set writes only a key that is still empty. So all ranks
        # read one decision, even if one is late and another has given up waiting.
        if not can:
            store.compare_set(f"{key}/verdict", "", NOT_ALL)
        elif store.compare_set(f"{key}/how", "", f"how {how}").decode() != f"how {how}":
            store.compare_set(f"{key}/verdict", "", DIFFERENT)
        elif c10d.comes_last(store, f"{key}/count", len(ranks)):
            store.compare_set(f"{key}/verdict", "", ALL)
        try:
            store.wait([f"{key}/verdict"], datetime.timedelta(seconds=deadline_s))
        except RuntimeError:  # how stores say that time is up
            store.compare_set(f"{key}/verdict", "", NOT_ALL)
            log.warning(
                "After %.0f s, some of ranks %s had not said of %s.", deadline_s, ranks, what
            )
        return store.get(f"{key}/verdict").decode()
    except (RuntimeError, OSError) as error:
        log.warning("Ranks could not agree on %s: the job's store failed (%s).", what, error)
        return NOT_ALL


@dataclass
class _Wrapper:
    """``text``: the same on all ranks. ``whole``: the way that was chosen; None before.

    ``differs``: it was not chosen because graphs of ranks hold it beside other wrappers each.
    """

    text: str
    ranks: Sequence[int]
    whole: bool | None = None
    differs: bool = False
    changes: int = 0


_known: WeakKeyDictionary[Any, _Wrapper] = WeakKeyDictionary()
_alike: Counter[str] = Counter()


def name(wrapper: Any, parameters: Sequence[tuple[Any, ...]], ranks: Sequence[int]) -> str:
    """Return the name of a wrapper: by its parameters, and by how many like it this process has met
    before.

    ``parameters`` says of each what is the same on all ranks: groups along one dimension of a mesh
    have names of their own, and rows may be uneven.
    """
    if wrapper not in _known:
        text = hashlib.sha256(repr(list(parameters)).encode()).hexdigest()[:16]
        _known[wrapper] = _Wrapper(f"{text}/{_alike[text]}", ranks)
        _alike[text] += 1
    return _known[wrapper].text


def are_whole(wrappers: Sequence[Any], cannot: Sequence[Any]) -> list[bool]:
    """Return of each wrapper in one graph whether its ranks run its forward whole; this one cannot
    those of ``cannot``.

    Where graphs of ranks end at different places, so that they hold other wrappers, none is whole:
    one rank would wait for votes on a wrapper while another waits for the order of a graph that
    ends before it.
    """
    together = " ".join(_known[each].text for each in wrappers)
    found = []
    for each in wrappers:
        found.append(is_whole(each, all(each is not other for other in cannot), together))
        if _known[each].differs:
            return [is_whole(other, False) for other in wrappers]
    return found


def is_open(wrapper: Any) -> bool:
    """Return whether the ranks of a wrapper have yet to choose a way, of those that launch."""
    return wrapper in _known and _known[wrapper].whole is None


def is_whole(wrapper: Any, can: bool, together: str = "") -> bool:
    """Return whether the ranks of a wrapper run its forward whole, given whether this one can.

    ``together`` names the wrappers of the graph. Asks them once; a rank that could and no longer
    can, because of a graph break that it meets later, asks them for the other way. Raises
    CannotFollowError where they go on as before.
    """
    mine = _known[wrapper]
    if mine.whole is None:
        verdict = vote(f"{mine.text} whole", mine.ranks, can, agreement_seconds(), together)
        mine.whole, mine.differs = verdict == ALL, verdict == DIFFERENT
    elif mine.whole and not can:
        mine.changes += 1
        way = f"{mine.text} eager {mine.changes}"
        if not all_can(way, mine.ranks, True, agreement_seconds()):
            raise CannotFollowError(
                f"A graph break has come into the forward of {type(wrapper).__name__}, which the "
                "job runs in one graph.",
                "In eager mode its gathers and averages are launched in other sizes than the other "
                "ranks' graphs launch them.",
                "Keep what breaks out of the forward, or have it on all ranks from the start.",
            )
        mine.whole = False
    return mine.whole and can
