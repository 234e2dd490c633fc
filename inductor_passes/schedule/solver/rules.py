"""Rules that a list scheduler is told to follow, and their portfolio."""

from __future__ import annotations

from dataclasses import dataclass

ANY = 1 << 60
ALWAYS = 1e9


@dataclass(frozen=True, slots=True)
class Rules:
    """One member of the portfolio.

    Times are parts of the lower bound, so that a rule means the same on small and large graphs.

    ``priority``: which backward run sets the latest starts: by "program" order, by longest "path" from
    the start, or "mixed". ``window``: how many tasks ahead of the oldest compute still to do may run.
    ``launch_ahead``: how far before its latest start a launch that waits for nothing may go.
    ``compute_ahead``: up to which distance compute counts as urgent; beyond, it goes by program order, and
    compute that waits for nothing, such as recomputation, is held back.
    ``rise_ahead``: how far ahead memory is kept free for the program's own order.
    ``merge``: weight of link time against copying when launches are merged; 0 never merges.
    ``busy``: for which part of the lower bound a channel may be busy before launches that merging would help
    wait for one another (``collect.py``); 0 never holds any back.
    ``patience``: idle for a more urgent task that becomes ready within this part of the other one's time.
    """

    priority: str
    window: int = ANY
    launch_ahead: float = 0.02
    compute_ahead: float = 0.02
    rise_ahead: float = 0.02
    merge: float = 0.0
    busy: float = 0.0
    patience: float = 0.0


# Chosen by greedy cover on backward graphs of Llama-3-8B and DeepSeek-V3 with their compute, links and
# floors made faster and slower, which turns them compute bound or bound by one channel or another. The
# third and fourth stay close to the program's order, for graphs without memory to spare. The last three
# are for links whose floors are long, as those of thousands of ranks; where none is, they are left out.
PORTFOLIO = (
    Rules("program", merge=1.0, patience=0.5),
    Rules("program", launch_ahead=0.005, rise_ahead=0.005, merge=0.3, patience=0.5),
    Rules("program", launch_ahead=0.08, compute_ahead=0.08, rise_ahead=ALWAYS),
    Rules("program", window=0, launch_ahead=0.08, compute_ahead=0.0, rise_ahead=0.3),
    Rules(
        "program", launch_ahead=0.08, compute_ahead=0.005, rise_ahead=0.005, merge=0.3, patience=0.5
    ),
    Rules("program", window=640, launch_ahead=0.08, compute_ahead=ALWAYS, patience=0.5),
    Rules("mixed", launch_ahead=0.3, compute_ahead=0.0),
    Rules("mixed", window=80, compute_ahead=ALWAYS),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0),
    Rules("mixed", window=160, compute_ahead=ALWAYS, rise_ahead=0.08, merge=1.0, patience=0.5),
    Rules("path", launch_ahead=0.08, compute_ahead=0.08),
    Rules("program", merge=1.0, busy=0.75, patience=0.5),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0, busy=0.3),
    Rules("mixed", window=160, rise_ahead=0.005, merge=1.0, busy=0.9),
)
