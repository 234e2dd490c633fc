"""Ranks take one of two ways together: the new one if all of them can, before the first of them goes it.

Through the job's store. Who comes first waits for the others, but not for ever: after the deadline the old way is
taken, and whoever comes later finds that said.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections.abc import Sequence

from inductor_passes.torch_compat import c10d

log = logging.getLogger(__name__)

ALL, NOT_ALL, DIFFERENT = "all", "not all", "different"


def all_can(what: str, ranks: Sequence[int], can: bool, deadline_s: float) -> bool:
    """Return whether every rank of ``ranks`` can do ``what``; see ``vote``."""
    return vote(what, ranks, can, deadline_s) == ALL


def vote(what: str, ranks: Sequence[int], can: bool, deadline_s: float, how: str = "") -> str:
    """Return ALL if every rank of ``ranks`` can do ``what``, a text that is the same on all of them.

    Each of them calls it once for a text. A rank that cannot ends the waiting of the others: NOT_ALL. So it is if some
    do not come within ``deadline_s``, or the store fails. DIFFERENT if ranks that can say unlike things of ``how``.
    Where there is one process, or nothing to wait for (``deadline_s`` 0), this one decides alone.
    """
    store = c10d.job_store()
    if store is None or len(ranks) < 2 or deadline_s <= 0:
        return ALL if can else NOT_ALL
    key = f"dynamo_dist/votes/{hashlib.sha256(f'{what} {sorted(ranks)}'.encode()).hexdigest()}"
    try:
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
