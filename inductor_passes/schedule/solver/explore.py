"""More drafts than the portfolio: other rules at random, and the best drafts disturbed.

Pseudo-random numbers from a fixed seed, and a budget counted in drafts: the result depends on the problem
alone.
"""

from __future__ import annotations

import random
from dataclasses import replace

from inductor_passes.schedule.solver.rules import ALWAYS, ANY, Rules
from inductor_passes.schedule.solver.search import Found, Search

WORK = 600_000  # tasks scheduled in all; about a minute
FEWEST, MOST = 12, 240  # drafts
BEST = 4  # how many drafts are worth disturbing
REACH = 0.15  # of the makespan: how much of a schedule one disturbance touches

CHOICES: dict[str, tuple[object, ...]] = {
    "priority": ("program", "path", "mixed"),
    "window": (0, 40, 80, 160, 320, 640, ANY),
    "launch_ahead": (0.005, 0.02, 0.08, 0.3),
    "compute_ahead": (0.0, 0.005, 0.02, 0.08, ALWAYS),
    "rise_ahead": (0.005, 0.02, 0.08, 0.3, ALWAYS),
    "merge": (0.0, 0.3, 1.0),
    "busy": (0.0, 0.3, 0.75, 0.9),
    "patience": (0.0, 0.5),
}


def explore(search: Search) -> None:
    """Add drafts to ``search.found``: half by random rules first, then half from the best so far."""
    rng = random.Random(0)
    count = max(FEWEST, min(MOST, WORK // max(1, search.tasks.count)))
    for _ in range(count // 2):
        rules = Rules("program")
        for name in CHOICES:
            rules = _change(rules, name, rng)
        search.draft_by(rules)
    for k in range(count - count // 2):
        best = search.best(BEST)
        start = best[k % len(best)]
        rules = start.rules
        if rng.random() < 0.5:
            rules = _change(rules, rng.choice(list(CHOICES)), rng)
        search.draft_from(replace(start, rules=rules), _disturbed(search, start, rng))


def _change(rules: Rules, name: str, rng: random.Random) -> Rules:
    return replace(rules, **{name: rng.choice(CHOICES[name])})  # type: ignore[arg-type]


def _disturbed(search: Search, start: Found, rng: random.Random) -> list[float]:
    """Latest starts of a draft, with noise over one stretch of it."""
    latest = search.latest_from(start)
    span = start.draft.makespan_us
    begin = rng.uniform(-REACH, 1.0) * span
    end = begin + 2 * REACH * span
    strength = rng.choice((0.001, 0.005, 0.02)) * span
    return [at + rng.gauss(0.0, strength) if begin <= at <= end else at for at in latest]
