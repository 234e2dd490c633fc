"""Which drafts are worth their time on a problem of many equal layers: those that were best on a few of the layers."""

from __future__ import annotations

import itertools

from inductor_passes.schedule.model.bound import lower_bound
from inductor_passes.schedule.model.own_bound import own_bound
from inductor_passes.schedule.model.problem import Problem
from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.live_memory import RiseAhead
from inductor_passes.schedule.solver.search import Found, Search


def rehearse(
    few: Problem, shrunk: float, extra_bytes: int, scale_us: float, merges: bool
) -> list[Found]:
    """Search on ``few``, a problem folded, and return what led to its drafts, best first.

    In front stands the best of those that keep to the cap on the whole even if they take more memory with each layer.
    ``shrunk``: how many times as many nodes the whole has.

    ``extra_bytes``: above the peak of the program's own order. ``scale_us``: of the whole, so that a rule that
    looks some time ahead looks as far; how busy a channel may be is part of the few layers' own time.
    """
    tasks = Tasks(few)
    least = own_bound(tasks)
    peak = RiseAhead(tasks).peak
    search = Search(
        tasks,
        peak + extra_bytes,
        scale_us,
        merges,
        least=least,
        busy_scale_us=lower_bound(few).us,
    )
    search.run()
    ways: dict[object, Found] = {}
    for found in search.best(len(search.found)):
        ways.setdefault((found.rules, found.how), found)
    lean = (f for f in ways.values() if (f.draft.peak_bytes - peak) * shrunk <= extra_bytes)
    first = list(itertools.islice(lean, 1))
    return first + [found for found in ways.values() if found not in first]
