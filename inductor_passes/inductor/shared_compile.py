"""Share one rank's compile of a graph: ranks whose graphs have the same key load what it made.

By default ranks with one cache folder share, those of a host as a rule; with
``options={"compile": "shared"}`` all ranks of the job. Every rank traces its program, so that each
has its own guards and its own errors. Its graph holds a number for all that the program read of its
rank. Ranks share what follows: here, Inductor's lowering of one graph, and its code. Where ranks
traced a whole program to the same graph, they share all that follows the trace
(``shared_trace.py``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from inductor_passes import files
from inductor_passes.ranks import decision
from inductor_passes.ranks.collective_trace import CollectiveTrace, Group
from inductor_passes.ranks.compile_once import Claim, End, Turn, Waiting, claim
from inductor_passes.ranks.coordination import Coordination, CoordinationError, deadline_s
from inductor_passes.ranks.decision import Offer
from inductor_passes.torch_compat import c10d, caches
from inductor_passes.torch_compat.nodes import size_hint

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession

log = logging.getLogger(__name__)
Offers = Callable[[CollectiveTrace, Offer], Offer]


def _own(_: CollectiveTrace, offer: Offer) -> Offer:
    return offer


class SharedLowering:
    """Run one compile of a graph that another rank may share.

    ``made_by``: the rank that compiled it; None if it is this one. ``sizes``: hints of symbols in
    the graph. The graph's key leaves them out, but the claim's key adds them: the graph's launches
    depend on them. ``offers``: passes on this rank's votes to ranks that wait for the program of
    this graph.
    """

    def __init__(
        self, job: Coordination, rank: int, sizes: str = "", offers: Offers | None = None
    ) -> None:
        self._job, self._rank, self._sizes, self._offers = job, rank, sizes, offers or _own
        self.key = ""  # of a graph that was missed
        self._claim: Claim | None = None
        self._mark = "-"
        self.made_by: int | None = None

    def missed(self, key: str) -> bool:
        """A graph is not in the cache. Returns whether it may be there now; if not, this rank
        compiles it.
        """
        if self.key:
            return False
        self.key = key
        try:
            self._mark = leave_mark()
            found = claim(self._job, f"{key}{self._sizes}", self._rank, self._mark)
            if isinstance(found, Turn):
                return self._wait(found)
            self._claim = found
        except CoordinationError as error:
            log.warning("The job's store failed: this rank compiles a graph by itself (%s).", error)
        return False

    def _wait(self, turn: Turn) -> bool:
        if turn.rank == self._rank:  # compiled here before, and gone from the cache
            return False
        log.info("Rank %d compiles this graph: waiting for it.", turn.rank)
        is_apart = not is_here(turn.folder)
        waiting = wait_for(self._job, turn, self._rank, self._mark, self._offers)
        outcome = waiting.outcome()
        if isinstance(outcome, Claim):
            self._claim = outcome
            return False
        if outcome.digest and (not is_apart or self._fetch(waiting, outcome)):
            self.made_by = waiting.turn.rank
            return True
        log.info("Rank %d has no entry for this one: compiling.", waiting.turn.rank)
        return False

    def _fetch(self, waiting: Waiting, end: End) -> bool:
        """Put into this rank's folder what came through the store; nothing that is not what was
        announced.
        """
        held = caches.newest_entry(self.key)
        if held is not None and hashlib.sha256(held).hexdigest() == end.digest:
            return True
        entry = waiting.entry()
        if entry is None or hashlib.sha256(entry).hexdigest() != end.digest:
            return False
        return caches.put_entry(self.key, entry)

    def offers(self, trace: CollectiveTrace, offer: Offer) -> Offer:
        """Return ``offer``, also for ranks that wait; some are in other groups of these names."""
        if self._claim is None:
            return offer
        return self._claim.offers(alike(trace), offer)

    def end(self) -> None:
        """Say what came of this rank's turn, if it had one."""
        if self._claim is not None:
            entry = caches.newest_entry(self.key)
            digest = "" if entry is None else hashlib.sha256(entry).hexdigest()
            self._claim.end(
                digest, entry if entry is not None and self._claim.is_wanted() else None
            )


@contextlib.contextmanager
def share_lowering(
    session: CompileSession, inputs: Sequence[object]
) -> Iterator[SharedLowering | None]:
    """A graph with these inputs that is lowered in the block is lowered by one rank of those
    that have it, if that is asked for.
    """
    job = job_to_share(session)
    if job is None:
        yield None
        return
    offers = _own if session.shared_trace is None else session.shared_trace.offers
    lowering = SharedLowering(job, c10d.global_rank(), _hints(inputs), offers)
    try:
        with caches.lowered_entries(lowering.missed):
            yield lowering
    finally:
        lowering.end()


def job_to_share(session: CompileSession) -> Coordination | None:
    """Return the job whose ranks share a compile; None where that is not wanted, or there is no
    other rank.
    """
    wanted = session.options.compile != "each" and not session.cache_salt
    store = c10d.job_store() if wanted else None
    if store is None or (c10d.world_size() or 1) < 2:
        return None
    if session.options.compile == "shared":
        return Coordination(store)
    if not deadline_s():  # ranks are to wait for nothing that they have not asked for
        return None
    try:
        return Coordination(store, f"in {_folder()}/")
    except OSError as error:
        _say_once(f"the cache folder cannot be written ({error})")
        return None


def wait_for(job: Coordination, turn: Turn, rank: int, mark: str, offers: Offers) -> Waiting:
    """Let this rank wait for another's turn; it asks for the entry if that has another folder."""
    waiting = Waiting(
        job, turn, rank, mark, functools.partial(vote, offers), still_s=deadline_s() or None
    )
    if not is_here(turn.folder):
        waiting.want()
    return waiting


def _hints(inputs: Sequence[object]) -> str:
    """Hints of all sizes among inputs that are symbols, in order, as text."""
    sizes = (
        size
        for each in inputs
        for size in (each.shape if isinstance(each, torch.Tensor) else (each,))
        if isinstance(size, torch.SymInt)
    )
    return "".join(f" {size} {size_hint(size)}" for size in sizes)


def alike(trace: CollectiveTrace) -> CollectiveTrace:
    """Return a trace whose groups have the names that all ranks have for them."""
    groups = (replace(each, name=c10d.name_in_graphs(each.name)) for each in trace.groups)
    return replace(trace, groups=tuple(groups))


def vote(offers: Offers, trace: CollectiveTrace, offer: Offer) -> None:
    """Vote on the launches of an equal graph of another rank; so do ranks that wait for the
    program that this rank compiles.
    """
    job = decision.current()
    if job is not None:
        names = (c10d.own_name(group.name) for group in trace.groups)
        own = ((name, c10d.real_group_ranks(name)) for name in names)
        groups = tuple(Group(name, ranks or ()) for name, ranks in own)
        own_trace = replace(trace, groups=groups)
        job.decide(own_trace, offers(own_trace, offer))


def leave_mark() -> str:
    """Return this process's file in its cache folder, by which others see whether it is theirs;
    "-" if there can be none.
    """
    try:
        return _marked(_marks())
    except OSError as error:
        _say_once(f"the cache folder cannot be written ({error})")
        return "-"


@functools.cache
def _marked(marks: str) -> str:
    mark = uuid.uuid4().hex
    files.put(marks, mark, "")
    return mark


def is_here(mark: str) -> bool:
    """Return whether a mark lies in this process's cache folder."""
    return os.path.exists(os.path.join(_marks(), mark))


def _marks() -> str:
    return os.path.join(caches.cache_dir(), "inductor_passes", "compiling")


def _folder() -> str:
    """Name the cache folder as all processes do that have it: by a file that the first one makes.
    Not one of the marks, of which the oldest are removed.
    """
    folder = os.path.join(caches.cache_dir(), "inductor_passes")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "folder"), "a") as file:
        found = os.stat(file.fileno())
    return f"{found.st_ino} {found.st_mtime_ns}"


@functools.cache
def _say_once(why: str) -> None:
    log.warning("Ranks share compiles, but %s: this rank compiles for itself.", why)
