"""Compiled, or in eager mode: ranks that launch together choose alike.

In eager mode a function launches collectives in the program's order; compiled, in the order that
all ranks agreed on. A rank that falls back alone would wait for its peers, or take other data.

A wrapper's forward (FSDP2, DDP): the ranks vote before the graph that holds it is first compiled.
If one of them cannot compile it so, none does. The first rank to vote waits for the others, until a
deadline. After the deadline all ranks run the forward in eager mode: the verdict stays in the
store, and ranks that vote later find it there.

Dynamo runs a function eagerly once it has compiled it ``recompile_limit`` times. If the compiled
function launches otherwise than eager mode would, it stays compiled.

Dynamo also runs a function eagerly where a graph break stands in a loop or a ``try``, after which
it cannot resume. Then the function keeps the program's order on all ranks, and this rank runs it
eagerly for as long as the job lasts. Otherwise this rank could compile its caller again, for a
batch of another length and without that break. It would then launch collectives that its peers do
not expect.
"""

from __future__ import annotations

import hashlib
import logging
import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dynamo_dist.errors import CannotFollowError
from dynamo_dist.settings import agreement_seconds
from dynamo_dist.torch_compat import dynamo_frames
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.ranks import decision
from inductor_passes.ranks.coordination import (
    ALL,
    DIFFERENT,
    NOT_ALL,
    Coordination,
    CoordinationError,
    Verdict,
    unanimous,
)
from inductor_passes.torch_compat import c10d

log = logging.getLogger(__name__)


def vote(key: str, what: str, ranks: Sequence[int], can: bool, how: str = "") -> Verdict:
    """Return whether every rank of ``ranks`` can do something; see ``coordination.unanimous``.

    The verdict is NOT_ALL if the store fails. Where there is one process, or no time to wait, this
    rank decides alone.
    """
    store, deadline_s = c10d.job_store(), agreement_seconds()
    if store is None or len(ranks) < 2 or deadline_s == 0:
        return ALL if can else NOT_ALL
    digest = hashlib.sha256(f"{key} {sorted(ranks)}".encode()).hexdigest()
    steps = unanimous(f"wrapper/{digest}", what, c10d.global_rank(), ranks, can, how)
    try:
        return Coordination(store).run(steps, deadline_s)
    except CoordinationError as error:
        log.warning("Ranks could not agree on whether to %s: %s", what, error)
        return NOT_ALL


@dataclass
class _Wrapper:
    """What ranks have agreed on for one wrapper.

    ``key``: the same on all ranks. ``in_graph``: the way that was chosen; None before. ``differs``:
    eager mode was chosen because graphs of ranks hold it beside other wrappers each.
    """

    key: str
    ranks: Sequence[int]
    in_graph: bool | None = None
    differs: bool = False


_wrappers: WeakKeyDictionary[Any, _Wrapper] = WeakKeyDictionary()
_equal: Counter[str] = Counter()


def name(
    wrapper: Any, path: str, parameters: Sequence[tuple[Any, ...]], ranks: Sequence[int]
) -> str:
    """Return the key of a wrapper, the same on all ranks.

    ``path``: its name in the model, "" for a root. ``parameters`` says of each what is the same on
    all ranks: groups along one dimension of a mesh have names of their own, and rows may be ragged.
    """
    if wrapper not in _wrappers:
        text = hashlib.sha256(repr((path, list(parameters))).encode()).hexdigest()[:16]
        # Models that are equal by name and shapes, as a teacher and its student, are told apart by
        # the order in which the program first runs them: nothing else of them is the same on all
        # ranks. Layers of one model have paths, so ranks may come to them in any order.
        _wrappers[wrapper] = _Wrapper(f"{text}/{_equal[text]}", ranks)
        _equal[text] += 1
    return _wrappers[wrapper].key


def run_in_graph(wrappers: Sequence[Any], cannot: Sequence[Any]) -> list[bool]:
    """Return of each wrapper in one graph whether its ranks run its forward in the graph; this rank
    cannot do so with those of ``cannot``.

    Where graphs of ranks end at different places, so that they hold other wrappers, none is in the
    graph: one rank would wait for votes on a wrapper while another waits for the order of a graph
    that ends before it.
    """
    together = " ".join(_wrappers[each].key for each in wrappers)
    found = []
    for each in wrappers:
        found.append(runs_in_graph(each, all(each is not other for other in cannot), together))
        if _wrappers[each].differs:
            return [runs_in_graph(other, False) for other in wrappers]
    return found


def is_open(wrapper: Any) -> bool:
    """Return whether the ranks of a wrapper have yet to choose a way, of those that launch."""
    return wrapper in _wrappers and _wrappers[wrapper].in_graph is None


def runs_in_graph(wrapper: Any, can: bool, together: str = "") -> bool:
    """Return whether the ranks of a wrapper run its forward in one graph, given whether this one
    can.

    ``together`` names the wrappers of the graph. Asks them once; a rank that could and no longer
    can, because of a graph break that it meets later, asks them for the other way. Raises
    CannotFollowError where they go on as before.
    """
    mine, kind = _wrappers[wrapper], type(wrapper).__name__
    if mine.in_graph is None:
        what = f"run the forward of {kind} in a graph"
        verdict = vote(mine.key, what, mine.ranks, can, together)
        mine.in_graph, mine.differs = verdict == ALL, verdict == DIFFERENT
    elif mine.in_graph and not can:
        # Happens once a wrapper: it never returns to the graph.
        what = f"leave the forward of {kind} to eager mode"
        if vote(f"{mine.key} eager", what, mine.ranks, True) != ALL:
            raise CannotFollowError(
                f"A graph break has come into the forward of {kind}, which the job runs in one "
                "graph.",
                "In eager mode its gathers and averages are launched in other sizes than the other "
                "ranks' graphs launch them.",
                "Keep what breaks out of the forward, or have it on all ranks from the start.",
            )
        mine.in_graph = False
    return mine.in_graph and can


_warned: set[int] = set()


def patches() -> list[Patch]:
    """List the changes to apply while the plugin is enabled."""
    return [
        *dynamo_frames.ask_before_giving_up(stays_compiled),
        *dynamo_frames.on_what_is_left_to_python(left_to_python, stays_in_python),
    ]


def left_to_python(code: types.CodeType) -> None:
    """Dynamo could not compile a function. Raises CannotFollowError where other ranks launch by
    a plan for it.
    """
    if (job := decision.current()) is not None:
        job.leave_to_python(code)


def stays_in_python(code: types.CodeType) -> bool:
    """Return whether a function was left to Python before, in this job."""
    return (job := decision.current()) is not None and job.is_left_to_python(code)


def stays_compiled(frame_id: int | None, limit: str) -> bool:
    """Return whether a function, by Dynamo's number in this process, is compiled again beyond a
    limit.
    """
    job = decision.current()
    if job is None or frame_id is None or not job.is_unlike_python(frame_id):
        return False
    if frame_id not in _warned:
        _warned.add(frame_id)
        log.warning(
            "A function is compiled again although torch._dynamo.config.%s is reached: all ranks "
            "agreed on collectives that differ from eager mode's, so it cannot run in eager mode. "
            "Each further value of what it depends on costs a compile: TORCH_LOGS=recompiles names "
            "that. Let sizes be dynamic (dynamic=None or True, or torch._dynamo.mark_dynamic), and "
            "schedulers change nothing but learning rates (cycle_momentum=False).",
            limit,
        )
    return True
