"""The order of launches for one graph of this rank: known already, safe without asking, or settled with all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from inductor_passes.agree.plan import PROGRAM
from inductor_passes.agree.register import Known, Register
from inductor_passes.agree.settle import Settling, leave
from inductor_passes.agree.store import Steps
from inductor_passes.agree.stream import Group, Stream, digest
from inductor_passes.errors import CannotFollowError, RanksDifferError


class Offer(Protocol):
    """Offer of this rank's graph: the plan that it would choose, and whether it can follow another."""

    def plan(self) -> str:
        """The plan that this rank would choose alone."""

    def can_follow(self, plan: str) -> bool:
        """Return whether its graph can launch as a plan says."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision for a graph: the plan that it launches by, and how it came about.

    ``plan``: a plan's text. ``how``: for reports and logs. ``given_up``: whether other graphs lost their plans by
    it. ``missing``: ranks that did not come in time.
    """

    plan: str
    how: str
    given_up: bool = False
    missing: tuple[int, ...] = ()


def decide(
    me: int, stream: Stream, offer: Offer, register: Register, around: Sequence[Group] = ()
) -> Steps[Decision]:
    """Decide, once a graph, before it first runs. ``around``: all groups of this process that move data.

    Raises RanksDifferError where the program's ranks do not match, and CannotFollowError where this rank alone
    got a graph that cannot launch as its peers' graphs do.
    """
    stream = replace(stream, behind_python=register.is_behind_python(stream))
    key = stream.key
    known = register.get(stream, key)
    follows = known is not None and (known.plan == PROGRAM or offer.can_follow(known.plan))
    if known is not None and known.ours and follows:
        register.add(key, stream, known.plan, ended=known.ended, settled_as=known.settled_as)
        return Decision(known.plan, "as settled before")
    given_up = False
    for other in register.reordered(stream, None if follows else known):
        missing = yield from leave(me, other)
        if missing:
            raise _cannot_follow(stream, other, missing)
        register.give_up(other)
        given_up = True
    if known is not None or stream.is_one_sided or register.keeps_order(stream, key):
        # Who keeps the program's order matches all who do, however their graphs are cut.
        yield from Settling(me, stream, key, register, around).pass_by()
        register.add(key, stream, PROGRAM, ended=True)
        return Decision(
            PROGRAM, "the program's: the same launches stand in other graphs too", given_up
        )
    settling = Settling(me, stream, key, register, around)

    def can_follow(plan: str) -> bool:
        return plan == PROGRAM or offer.can_follow(plan)

    plan = next(filter(can_follow, register.alike(stream)), None) or offer.plan()
    outcome = yield from settling.settle(plan, can_follow)
    if outcome.why == "ranks differ":
        raise RanksDifferError(
            outcome.message,
            "Ranks match the collectives of a group by their order, so they would hang or mix up data.",
            "Make the compiled program the same on all ranks. "
            "DYNAMO_DIST_AGREEMENT_SECONDS=0 turns this check off.",
        )
    if stream.joint and outcome.why == "streams differ":
        raise CannotFollowError(
            f"The ranks have cut {stream.graph or stream.root} into parts, and one of them then launches something else.",
            "Its forward or its backward graph did not compile there, or was left to Python; launching the parts beside "
            "it would hang or mix up data.",
            "Let all ranks compile it, or leave graphs whole with options={'split': 'off'}.",
        )
    if outcome.why == "too late" and (running := register.may_be_running(stream)) is not None:
        raise _cannot_follow(stream, running, outcome.missing)
    register.add(key, stream, outcome.plan, ended=outcome.why in ("streams differ", "too late"))
    if outcome.why == "streams differ":
        register.note_cut(stream.root)
    return Decision(outcome.plan, _HOW[outcome.why], given_up, outcome.missing)


def leave_to_python(
    me: int, root: str, callers: Collection[str], register: Register, around: Sequence[Group]
) -> Steps[bool]:
    """This rank runs a function in Python from now on, in the program's order, and no graph of it will be settled.

    ``callers``: what calls it now, as ``function:line``. Whoever settles a stream with launches of it is told, now and later. Returns whether plans were given up.
    Raises CannotFollowError where its peers go on launching by one.
    """
    if not register.leaves_to_python(root):
        stream = Stream(tuple(around), (), partial=True, root=root)
        yield from Settling(me, stream, f"python/{digest(root)}", register, around).pass_by()
    given_up = False
    for known in register.reordered_in(root, callers):
        missing = yield from leave(me, known)
        if missing:
            raise CannotFollowError(
                f"This rank alone runs {root} in Python, whose launches cannot follow the order that the job runs "
                f"by now: ranks {', '.join(map(str, missing))} launch {known.stream.graph or known.stream.root} "
                "in an order of its own.",
                "A graph break behind which Dynamo cannot go on, in a loop or in a `try`, leaves the whole function "
                "to Python; launching in another order than its peers would hang or mix up data.",
                _REMEDY,
            )
        register.give_up(known)
        given_up = True
    return given_up


_HOW = {
    "agreed": "settled by all ranks",
    "one cannot": "the program's: one rank's graph cannot follow",
    "streams differ": "the program's: ranks' graphs are cut differently",
    "too late": "the program's: some ranks did not come in time",
}


def _cannot_follow(stream: Stream, running: Known, missing: Sequence[int]) -> CannotFollowError:
    first = next((launch for launch in stream.launches if launch.line), stream.launches[0])
    where = f" at {first.line}" if first.line else ""
    absent = f" Ranks {', '.join(map(str, missing))} did not come with it." if missing else ""
    return CannotFollowError(
        f"This rank alone compiled a graph, {stream.graph or stream.root}, whose launches cannot follow the "
        f"order that the job runs by now: it launches '{first.text()}'{where} first, while "
        f"{running.stream.graph or running.stream.root or 'the graph of the other ranks'} launches "
        f"{len(running.stream.launches)} in an order of its own.{absent}",
        "The order was settled by all ranks when they compiled; a graph break or a branch that one rank alone "
        "meets later cuts its graph, and launching in another order than its peers would hang or mix up data.",
        _REMEDY,
    )


_REMEDY = (
    "Let all ranks meet the break (or none), meet it in the first step already, take it out (TORCH_LOGS=graph_breaks "
    "shows it), or keep the program's order with options={'schedule': 'off', 'disable': ['bucket_averages', 'merge_tiny']}."
)
