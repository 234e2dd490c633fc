"""The orders of launches that this process has settled with the other ranks of its job."""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from inductor_passes.agree.decide import Decision, Offer, decide, leave_to_python
from inductor_passes.agree.plan import PROGRAM
from inductor_passes.agree.register import Register
from inductor_passes.agree.store import StoreFailedError, run
from inductor_passes.agree.stream import Group, Stream
from inductor_passes.errors import OptionError
from inductor_passes.torch_compat import c10d, dynamo
from inductor_passes.torch_compat.c10d import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

SECONDS = "DYNAMO_DIST_AGREEMENT_SECONDS"
PREFIX = "dynamo_dist/order/"


def seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds for which a rank waits for others to compile the same graph; 0 settles nothing.

    Raises OptionError, naming the variable, for what is no number of at least 0.
    """
    value = (os.environ if environ is None else environ).get(SECONDS, "") or "30"
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise OptionError(
            f"{SECONDS} is {value!r}.",
            "It is the time, in seconds, for which a rank waits for others to compile a graph.",
            "Set it to a number of at least 0; 0 settles nothing, and keeps the program's order of launches.",
        )
    return number


class Orders:
    """Streams and plans settled in one job: as long as its default process group lives.

    ``store``: None where ranks cannot meet; then every graph keeps the program's order.
    """

    def __init__(self, store: Store | None, rank: int, default_group: object) -> None:
        self._store, self._rank = store, rank
        self._default_group = default_group
        self._register = Register()
        self._given_up = 0
        self._frames_unlike_python: set[int] = set()
        self._left_to_python: set[tuple[str, types.CodeType]] = set()

    def is_current(self) -> bool:
        """Return whether the job is still the one that this was made for."""
        return c10d.default_group() is self._default_group

    def decide(self, stream: Stream, offer: Offer) -> Decision:
        """The order of launches for a graph of this rank, before it first runs. Waits for other ranks.

        Raises RanksDifferError and CannotFollowError.
        """
        decision = self._settle(stream, offer)
        # In Python a parameter that is gathered again for its backward is gathered once.
        unlike_python = decision.plan != PROGRAM or (stream.backward and stream.gathers)
        if unlike_python and (frame := dynamo.frame_number()) is not None:
            self._frames_unlike_python.add(frame)
        return decision

    def _settle(self, stream: Stream, offer: Offer) -> Decision:
        deadline_s = seconds()
        if self._store is None or deadline_s == 0:
            _say_once(
                f"{SECONDS} is 0" if self._store is not None else "The job has no store",
            )
            return Decision(PROGRAM, "the program's: ranks do not compare")
        around = _groups()
        _, root = dynamo.frame_in_work()
        if root:  # code from a cache may be called from elsewhere than where it was made
            stream = replace(stream, callers=dynamo.callers())
        steps = decide(self._rank, stream, offer, self._register, around)
        try:
            decision = run(steps, self._store, PREFIX, deadline_s)
        except StoreFailedError as error:
            log.warning(
                "The job's store failed while ranks settled the launches of graph %s (%s): it keeps the program's "
                "order of launches. If other ranks do not, the job may hang.",
                stream.graph,
                error,
            )
            self._register.add(stream.key, stream, PROGRAM, ended=True)
            return Decision(PROGRAM, "the program's: the job's store failed")
        if decision.given_up:
            self._given_up += 1
        if decision.missing:
            log.warning(
                "After %.0f s, rank %s had not compiled graph %s: it keeps the program's order of launches. "
                "If the program hangs, its ranks do not launch the same.",
                deadline_s,
                ", ".join(map(str, decision.missing)),
                stream.graph,
            )
        return decision

    def leave_to_python(self, code: types.CodeType) -> None:
        """This rank runs a function in Python from now on, which is being called: tell the others.

        Waits where a plan must be left. Raises CannotFollowError.
        """
        deadline_s, root = seconds(), dynamo.root_of(code)
        if self._store is None or deadline_s == 0:
            return
        steps = leave_to_python(self._rank, root, dynamo.callers(), self._register, _groups())
        try:
            given_up = run(steps, self._store, PREFIX, deadline_s)
        except StoreFailedError as error:
            log.warning(
                "The job's store failed while this rank left %s to Python (%s): if other ranks compile it, "
                "the job may hang.",
                root,
                error,
            )
            return
        self._given_up += given_up
        self._left_to_python.add((code.co_filename, code))

    def can_meet(self) -> bool:
        """Return whether this rank can settle anything with the others."""
        return self._store is not None and seconds() > 0

    def is_left_to_python(self, code: types.CodeType) -> bool:
        """Return whether this rank has left a function to Python, as its peers know for as long as the job lasts."""
        # Code of two files may be equal. To hash it takes time, in each call that is traced.
        return bool(self._left_to_python) and (code.co_filename, code) in self._left_to_python

    def is_unlike_python(self, frame: int) -> bool:
        """Return whether a function, by Dynamo's number in this process, has a graph that launches unlike Python."""
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
        """Return the part of a cache key that tells whether ranks settle anything at all."""
        return "settled" if self.can_meet() else "program"


def _groups() -> list[Group]:
    return [Group(name, ranks) for name, ranks in sorted(c10d.real_groups().items())]


_orders: dict[int, Orders] = {}


def current() -> Orders | None:
    """Return the orders settled in the job of this process; None where no group moves data between processes."""
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
        "%s: ranks cannot settle on an order of launches, so that compiled graphs keep the program's and merge "
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
