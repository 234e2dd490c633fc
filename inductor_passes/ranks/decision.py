"""Decide the collective order for one graph, and keep what this process has agreed with the
other ranks.
"""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import fx

from inductor_passes.errors import CannotFollowError, RanksDifferError
from inductor_passes.graph.collectives import JOINT, is_launch
from inductor_passes.ranks.carried import SharedChoice
from inductor_passes.ranks.collective_trace import PROGRAM, CollectiveTrace, Group, digest
from inductor_passes.ranks.coordination import (
    SECONDS,
    Coordination,
    CoordinationError,
    Steps,
    deadline_s,
)
from inductor_passes.ranks.decided_traces import DecidedTrace, DecidedTraces
from inductor_passes.ranks.protocol import OrderAgreement, leave
from inductor_passes.records import PassRecord
from inductor_passes.torch_compat import c10d, dynamo
from inductor_passes.torch_compat.c10d import Store


class Offer(Protocol):
    """Offer of this rank's graph: the plan that it would choose, and whether it can follow
    another.
    """

    def plan(self) -> str:
        """The plan that this rank would choose alone."""

    def can_follow(self, plan: str) -> bool:
        """Return whether its graph can launch as a plan says."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision for a graph: the plan that it launches by, and how it came about.

    ``plan``: a plan's text. ``how``: for reports and logs. ``given_up``: whether other graphs lost
    their plans by it. ``missing``: ranks that did not come in time.
    """

    plan: str
    how: str
    given_up: bool = False
    missing: tuple[int, ...] = ()


def decide(
    me: int,
    trace: CollectiveTrace,
    offer: Offer,
    decided: DecidedTraces,
    around: Sequence[Group] = (),
) -> Steps[Decision]:
    """Decide, once a graph, before it first runs. ``around``: all groups of this process that move
    data.

    Raises RanksDifferError where the program's ranks do not match, and CannotFollowError where this
    rank alone got a graph that cannot launch as its peers' graphs do.
    """
    trace = replace(trace, behind_python=decided.is_behind_python(trace))
    key = trace.key
    known = decided.get(trace, key)
    follows = known is not None and (known.plan == PROGRAM or offer.can_follow(known.plan))
    # Without this check, a step that this rank alone runs in pieces would call the graph of an
    # evaluation, by its plan, beside the whole step of its peers.
    conflicts = known is not None and decided.conflicts_with_callers(trace, known)
    if known is not None and known.ours and follows and not conflicts:
        decided.add(key, trace, known.plan, ended=known.ended, agreed_as=known.agreed_as)
        return Decision(known.plan, "as agreed before")
    agreement = OrderAgreement(me, trace, key, decided, around)
    if known is not None or trace.is_one_sided or decided.keeps_order(trace, key):
        # Who keeps the program's order matches all who do, however their graphs are cut. Ranks that
        # wait for this one to agree learn of it first, since they have to leave the plans too.
        yield from agreement.announce()
        same = None if follows and not conflicts else known
        given_up = yield from _leave_all(me, trace, decided.reordered(trace, same), decided)
        decided.add(key, trace, PROGRAM, ended=True)
        return Decision(
            PROGRAM, "the program's: the same launches stand in other graphs too", given_up
        )

    def can_follow(plan: str) -> bool:
        return plan == PROGRAM or offer.can_follow(plan)

    plan = next(filter(can_follow, decided.plans_elsewhere(trace)), None) or offer.plan()
    outcome = yield from agreement.agree(plan, can_follow)
    if outcome.why == "ranks differ":
        raise RanksDifferError(
            outcome.message,
            "Ranks match the collectives of a group by their order, so they would hang or mix up "
            "data.",
            "Make the compiled program the same on all ranks. "
            "INDUCTOR_PASSES_AGREEMENT_SECONDS=0 turns this check off.",
        )
    if trace.joint and outcome.why == "traces differ":
        raise CannotFollowError(
            f"The ranks have cut {trace.graph or trace.root} into parts, and one of them then "
            "launches something else.",
            "Its forward or its backward graph did not compile there, or was left to Python; "
            "launching the parts beside "
            "it would hang or mix up data.",
            "Let all ranks compile it, or leave graphs whole with options={'split': 'off'}.",
        )
    given_up = False
    if outcome.why in ("traces differ", "too late"):
        # Some rank does not run this graph. It may run the function in Python, and there call
        # graphs that were compiled for other calls, by their plans.
        called = decided.reordered(trace, None)
        if outcome.why == "too late":
            running = decided.may_be_running(trace) or next(iter(called), None)
            if running is not None:
                raise _cannot_follow(trace, running, outcome.missing)
        given_up = yield from _leave_all(me, trace, called, decided)
    decided.add(key, trace, outcome.plan, ended=outcome.why in ("traces differ", "too late"))
    if outcome.why == "traces differ":
        decided.record_cut(trace.root)
    return Decision(outcome.plan, _HOW[outcome.why], given_up, outcome.missing)


def _leave_all(
    me: int, trace: CollectiveTrace, plans: Sequence[DecidedTrace], decided: DecidedTraces
) -> Steps[bool]:
    """Leave plans that do not match ``trace``. Returns whether there were any.

    Raises CannotFollowError where peers go on launching by one.
    """
    for other in plans:
        missing = yield from leave(me, other)
        if missing:
            raise _cannot_follow(trace, other, missing)
        decided.give_up(other)
    return bool(plans)


def leave_to_python(
    me: int, root: str, callers: Collection[str], decided: DecidedTraces, around: Sequence[Group]
) -> Steps[bool]:
    """Announce that this rank runs a function in Python from now on, in the program's order.

    Ranks agree on no graph of this function. Ranks that agree on a trace with launches of it learn
    so, now and later. ``callers``: what calls it now, as ``function:line``. Returns whether plans
    were given up. Raises CannotFollowError where peers go on launching by one.
    """
    if not decided.leaves_to_python(root):
        trace = CollectiveTrace(tuple(around), (), partial=True, root=root)
        yield from OrderAgreement(me, trace, f"python/{digest(root)}", decided, around).announce()
    given_up = False
    for known in decided.reordered_in(root, callers):
        missing = yield from leave(me, known)
        if missing:
            raise CannotFollowError(
                f"This rank alone runs {root} in Python, whose launches cannot follow the order "
                "that the job runs "
                f"by now: ranks {', '.join(map(str, missing))} launch "
                f"{known.trace.graph or known.trace.root} "
                "in an order of its own.",
                "A graph break behind which Dynamo cannot go on, in a loop or in a `try`, leaves "
                "the whole function "
                "to Python; launching in another order than its peers would hang or mix up data.",
                _REMEDY,
            )
        decided.give_up(known)
        given_up = True
    return given_up


_HOW = {
    "agreed": "agreed by all ranks",
    "one cannot": "the program's: one rank's graph cannot follow",
    "traces differ": "the program's: ranks' graphs are cut differently",
    "too late": "the program's: some ranks did not come in time",
}


def _cannot_follow(
    trace: CollectiveTrace, running: DecidedTrace, missing: Sequence[int]
) -> CannotFollowError:
    first = next((launch for launch in trace.launches if launch.line), trace.launches[0])
    where = f" at {first.line}" if first.line else ""
    absent = f" Ranks {', '.join(map(str, missing))} did not come with it." if missing else ""
    return CannotFollowError(
        f"This rank alone compiled a graph, {trace.graph or trace.root}, whose launches cannot "
        f"follow the order that the job runs by now: it launches '{first.text()}'{where} first, "
        f"while {running.trace.graph or running.trace.root or 'the graph of the other ranks'} "
        f"launches {len(running.trace.launches)} in an order of its own.{absent}",
        "All ranks agreed on the order when they compiled; a graph break or a branch that "
        "one rank alone meets later cuts its graph, and launching in another order than its peers "
        "would hang or mix up data.",
        _REMEDY,
    )


_REMEDY = (
    "Let all ranks meet the break (or none), meet it in the first step already, take it out "
    "(TORCH_LOGS=graph_breaks "
    "shows it), or keep the program's order with options={'schedule': 'off', 'disable': "
    "['bucket_averages', 'merge_tiny']}."
)


log = logging.getLogger(__name__)
T = TypeVar("T")


class Orders:
    """Hold the traces and plans of one job, which lasts as long as its default process group.

    ``store``: None where ranks cannot reach each other; every graph then keeps the program's order.
    """

    def __init__(self, store: Store | None, rank: int, default_group: object) -> None:
        self._store = None if store is None else Coordination(store)
        self._rank = rank
        self._default_group = default_group
        self._decided = DecidedTraces()
        self._given_up = 0
        self._frames_unlike_python: set[int] = set()
        self._left_to_python: set[tuple[str, types.CodeType]] = set()

    def is_current(self) -> bool:
        """Return whether the job is still the one that this was made for."""
        return c10d.default_group() is self._default_group

    def decide(self, trace: CollectiveTrace, offer: Offer) -> Decision:
        """The order of launches for a graph of this rank, before it first runs. Waits for other
        ranks.

        Raises RanksDifferError and CannotFollowError.
        """
        decision = self._agree(trace, offer)
        # In Python a parameter that is gathered again for its backward is gathered once.
        unlike_python = decision.plan != PROGRAM or (trace.backward and trace.gathers)
        if unlike_python and (frame := dynamo.frame_number()) is not None:
            self._frames_unlike_python.add(frame)
        return decision

    def _agree(self, trace: CollectiveTrace, offer: Offer) -> Decision:
        most_s = deadline_s()
        if self._store is None or most_s == 0:
            _say_once(
                f"{SECONDS} is 0" if self._store is not None else "The job has no store",
            )
            return Decision(PROGRAM, "the program's: ranks do not compare")
        around = _groups()
        _, root = dynamo.frame_in_work()
        if root:  # code from a cache may be called from elsewhere than where it was made
            trace = replace(trace, callers=dynamo.callers())
        steps = decide(self._rank, trace, offer, self._decided, around)
        try:
            decision = self._store.run(steps, most_s)
        except CoordinationError as error:
            log.warning(
                "The job's store failed while ranks agreed on the order of graph %s (%s): it "
                "keeps the program's "
                "order of launches. If other ranks do not, the job may hang.",
                trace.graph,
                error,
            )
            self._decided.add(trace.key, trace, PROGRAM, ended=True)
            return Decision(PROGRAM, "the program's: the job's store failed")
        if decision.given_up:
            self._given_up += 1
        if decision.missing:
            log.warning(
                "After %.0f s, rank %s had not compiled graph %s: it keeps the program's order of "
                "launches. If the program hangs, its ranks do not launch the same.",
                most_s,
                ", ".join(map(str, decision.missing)),
                trace.graph,
            )
        return decision

    def leave_to_python(self, code: types.CodeType) -> None:
        """This rank runs a function in Python from now on, which is being called: tell the others.

        Waits where a plan must be left. Raises CannotFollowError.
        """
        most_s, root = deadline_s(), dynamo.root_of(code)
        if self._store is None or most_s == 0:
            return
        steps = leave_to_python(self._rank, root, dynamo.callers(), self._decided, _groups())
        try:
            given_up = self._store.run(steps, most_s)
        except CoordinationError as error:
            log.warning(
                "The job's store failed while this rank left %s to Python (%s): if other ranks "
                "compile it, the job may hang.",
                root,
                error,
            )
            return
        self._given_up += given_up
        self._left_to_python.add((code.co_filename, code))

    def as_first_rank(self, choice: SharedChoice) -> str:
        """Return what the first rank has chosen that chose about this, in the frame in work. That
        may be this rank, by this choice. Waits for nobody.
        """
        if self._store is None or not self.can_meet():
            return choice.text
        key = digest([choice.about, *dynamo.frame_in_work()])
        try:
            return self._store.propose(f"choice/{key}", choice.text)
        except CoordinationError as error:
            log.warning(
                "The job's store failed while ranks agreed on what to compile (%s): this rank does "
                "as it has chosen. If others do not, the job may hang.",
                error,
            )
            return choice.text

    def can_meet(self) -> bool:
        """Return whether this rank can agree on anything with the others."""
        return self._store is not None and deadline_s() > 0

    def is_left_to_python(self, code: types.CodeType) -> bool:
        """Return whether this rank has left a function to Python, as its peers know for as long
        as the job lasts.
        """
        # Code of two files may be equal. To hash it takes time, in each call that is traced.
        return bool(self._left_to_python) and (code.co_filename, code) in self._left_to_python

    def is_unlike_python(self, frame: int) -> bool:
        """Return whether a function has a graph that launches differently from eager Python.

        ``frame``: Dynamo's number of the function in this process.
        """
        return frame in self._frames_unlike_python

    def still_holds(self) -> Callable[[], bool]:
        """A check that fails once plans were given up, or the job's groups were made anew.

        A graph that was compiled before must be compiled again then.
        """
        given_up, group = self._given_up, self._default_group
        default_group = c10d.reads_default_group()

        def check() -> bool:
            return self._given_up == given_up and default_group() is group

        return check

    def digest(self) -> str:
        """Return the part of a cache key that says whether ranks agree on orders at all."""
        return "settled" if self.can_meet() else "program"


def _groups() -> list[Group]:
    return [Group(name, ranks) for name, ranks in sorted(c10d.real_groups().items())]


_orders: dict[int, Orders] = {}


def current() -> Orders | None:
    """Return the orders of this process's job; None where no group moves data between processes."""
    group = c10d.default_group()
    if group is None or not c10d.moves_data(group):
        _orders.clear()
        return None
    known = _orders.get(os.getpid())
    if known is None or not known.is_current():
        _orders.clear()
        known = _orders[os.getpid()] = Orders(c10d.job_store(), c10d.global_rank(), group)
    return known


@functools.cache
def _say_once(why: str) -> None:
    log.warning(
        "%s: ranks cannot agree on an order of launches, so that compiled graphs keep the "
        "program's and merge "
        "none.",
        why,
    )


def forget() -> None:
    """Drop everything, as if no graph had been compiled: for tests."""
    _orders.clear()
    _say_once.cache_clear()


def ranks_of(name: str) -> tuple[int, ...] | None:
    """Global ranks of a group that moves data between processes; None for any other."""
    return c10d.real_group_ranks(name)


@dataclass(frozen=True, slots=True)
class Joint:
    """Describe the joint graph that a graph is a half of.

    ``plan``: how all ranks launch it, with its chunks named; ``PROGRAM`` if it was left whole.
    ``trace``: its launches before; None where no ranks need to agree. ``record``: the record of
    the pass that cut it.
    """

    plan: str
    trace: CollectiveTrace | None = None
    record: PassRecord | None = None

    @property
    def is_cut(self) -> bool:
        """Return whether it was cut."""
        return self.plan != PROGRAM

    @property
    def key(self) -> str:
        """The name of its trace, if it was cut."""
        return self.trace.key if self.is_cut and self.trace is not None else ""


def record_on_launches(graph: fx.Graph, joint: Joint) -> None:
    """Keep the outcome on all launches of a joint graph: they carry it into both halves."""
    for node in graph.nodes:
        if is_launch(node):
            node.meta[JOINT] = joint


def half_of(graph: fx.Graph) -> Joint | None:
    """Return the joint graph that a graph with launches is a half of; None if there was none, or
    nobody looked at it.
    """
    found = (node.meta.get(JOINT) for node in graph.nodes if is_launch(node))
    return next((joint for joint in found if joint is not None), None)
