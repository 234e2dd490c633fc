"""Agree with all ranks on one collective order per graph, through the job's store.

Each rank compiles the graph. Its ``CollectiveTrace`` lists its collectives; a plan is an order of
them. The first rank with a trace proposes its plan. Every rank that compiles a graph of the same
trace votes whether its graph can follow. Voting ends once all ranks have voted that groups connect.
The last voter then writes the *decision*: the plan, or the program's order. One key holds the
decision. Only compare and set changes it, so that no two ranks ever read different decisions.

Some rank may never come with that trace: a graph break made two traces of it there, which run in
turn. The store therefore keeps a *state* of each group. It holds the trace that the group's ranks
are deciding now, and the traces that ended without a plan. A rank that comes with another trace
while one is undecided ends both: they keep the program's order, which needs no agreement. On that
group, the collectives of one must then be a prefix of the other's. Otherwise the program's ranks do
not match at all. A rank does not wait either if the state holds a trace that may run instead of its
own.

No rank waits beyond a deadline. After it, the trace keeps the program's order, on all ranks.

The keys, under the key K of a trace: ``proposal/K``, ``vote/K/RANK``, ``decision/K``,
``notice/K/RANK``
(ends the waiting of that rank), ``left/K/RANK`` (it follows the plan no more). ``group/ID`` holds
the state of a group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from torch import fx

from inductor_passes.errors import CannotFollowError, PassesError
from inductor_passes.graph.edit import TrialCopy
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    CollectiveTrace,
    Group,
    Launch,
    LaunchPlan,
    first_difference,
    packed,
    plan_of,
    shares_launch,
    unpacked,
)
from inductor_passes.ranks.coordination import (
    Await,
    CoordinationError,
    Steps,
    Swap,
    Write,
    gather,
    missing_votes,
    propose,
    read,
    vote,
    wait,
)
from inductor_passes.ranks.decided_traces import DecidedTrace, DecidedTraces

log = logging.getLogger(__name__)

Record = TypeVar("Record")  # what is told of a run
# Runs the passes on a graph, in place: as a plan says, or freely (None, False), or with launches as
# they are (None, True).
Run = Callable[[fx.Graph, LaunchPlan | None, bool], Record | None]


class GraphOffer(Generic[Record]):
    """A graph before its passes, and each way to run them that was tried; the graph itself stays
    as it is.
    """

    def __init__(self, graph: fx.Graph, trace: CollectiveTrace, run: Run[Record]) -> None:
        self._graph, self._trace, self._run = graph, trace, run
        self._tried: dict[str, tuple[TrialCopy, Record | None]] = {}

    def plan(self) -> str:
        """The plan that this rank would choose alone."""
        trial, record = self._try(None, False)
        text = plan_of(trial.graph).text_for(self._trace)
        self._tried[text] = trial, record
        return text

    def can_follow(self, plan: str) -> bool:
        """Return whether this rank's graph can launch as a plan says."""
        if plan in self._tried or plan == PROGRAM:
            return True
        try:
            trial, record = self._try(LaunchPlan.of(plan), True)
        except (CannotFollowError, ValueError) as error:
            log.info("Graph %s cannot follow a plan: %s", self._trace.graph, error)
            return False
        text = plan_of(trial.graph).text_for(self._trace)
        if text != plan:
            log.info(
                "Graph %s cannot follow plan %s: it would launch %s", self._trace.graph, plan, text
            )
            return False
        self._tried[plan] = trial, record
        return True

    def carry_out(self, plan: str) -> Record | None:
        """Make the graph launch as ``plan`` says, which it can follow."""
        if plan not in self._tried:
            trial, record = self._try(None, True)
            text = plan_of(trial.graph).text_for(self._trace)
            if text != PROGRAM:
                raise PassesError(
                    f"A pass changed the launches of graph {self._trace.graph}, which must stay "
                    f"the program's: {text}.",
                    "Ranks share the program's order alone here.",
                    "Set keeps_launch_order and changes_launches of your pass as its base class "
                    "says.",
                )
            self._tried[plan] = trial, record
        trial, record = self._tried[plan]
        trial.commit()
        return record

    def _try(self, plan: LaunchPlan | None, keep: bool) -> tuple[TrialCopy, Record | None]:
        trial = TrialCopy(self._graph, in_module=True)
        return trial, self._run(trial.graph, plan, keep)


class CachedOffer:
    """A graph whose code came from a cache, and launches as ``cached`` says."""

    def __init__(self, cached: str) -> None:
        self._cached = cached

    def plan(self) -> str:
        """The plan of its code."""
        return self._cached

    def can_follow(self, plan: str) -> bool:
        """Return whether it can launch so. The code is made anew for another plan, and if it
        cannot, that says so.
        """
        return True


Why = Literal["agreed", "one cannot", "traces differ", "ranks differ", "too late"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome for a trace: the plan to launch by, and why.

    ``plan``: a plan's text. ``why``: ``agreed``, or what left the program's order: a rank's graph
    could not follow the plan (``one cannot``), ranks came with different traces (``traces
    differ``) or with launches that do not match (``ranks differ``, ``message`` says which), or some
    did not come in time (``too late``, ``missing``).
    """

    plan: str
    why: Why
    message: str = ""
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Entry of the first rank that came with a trace: the rank, the trace and the rank's plan."""

    rank: int
    trace: CollectiveTrace
    plan: str

    def pack(self) -> str:
        return packed([self.rank, self.trace.to_json(), self.plan])

    @classmethod
    def unpack(cls, text: str) -> _Proposal:
        try:
            rank, trace, plan = unpacked(text)
            return cls(int(rank), CollectiveTrace.from_json(trace), str(plan))
        except (ValueError, TypeError) as error:
            raise CoordinationError(f"a trace in the store cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _GroupState:
    """Record a group's state: the trace that its ranks are deciding now, and those that ended.

    ``now``: key of the trace last posted there. ``by``: the rank that posted it first.
    ``partial``: whether it is partial on that rank. ``number``: which of the trace's groups this
    is. With -1 it is none of them: the trace only comes after launches here. ``ended``: keys
    without a plan.
    """

    now: str = ""
    by: int = -1
    partial: int = 0
    number: int = -1
    ended: tuple[str, ...] = ()

    def pack(self) -> str:
        where = (str(value) for value in (self.by, self.partial, self.number))
        return " ".join((self.now or "-", *where, *self.ended))

    @classmethod
    def unpack(cls, text: str) -> _GroupState:
        try:
            now, by, partial, number, *ended = text.split() or ["-", "-1", "0", "-1"]
            now = "" if now == "-" else now
            return cls(now, int(by), int(partial), int(number), tuple(ended))
        except ValueError as error:
            raise CoordinationError(f"a group's state cannot be read: {error}") from error


def leave(me: int, known: DecidedTrace) -> Steps[tuple[int, ...]]:
    """Leave the plan of a decided trace, and wait until all ranks of its groups have left it.

    Returns the ranks that did not leave; they may go on launching by the plan.
    """
    peers = sorted({rank for group in known.trace.groups for rank in group.ranks})
    what = f"leave the order of graph {known.trace.graph or known.trace.root}"

    def left(rank: int) -> str:
        return f"left/{known.agreed_as}/{rank}"

    yield Write(((left(me), "1"),))
    missing = []
    for rank in peers:
        if rank != me and not (yield Await(left(rank), what, ((rank, left(rank)),))):
            missing.append(rank)
    return tuple(missing)


class OrderAgreement:
    """Run the agreement of one rank on one trace.

    ``key``: names the trace, the same on all ranks. ``around``: the groups of this process. They
    matter for a trace that may come only after launches of groups other than its own.
    """

    def __init__(
        self,
        me: int,
        trace: CollectiveTrace,
        key: str,
        decided: DecidedTraces,
        around: Sequence[Group] = (),
    ) -> None:
        self.me, self.trace, self.key, self.decided = me, trace, key, decided
        self.peers = {rank for group in trace.groups for rank in group.ranks}
        # A piece's backward graph is compiled before the piece runs, and before what peers may be
        # settling.
        ahead = around if trace.backward and trace.partial else ()
        self.watched = {group.id: group for group in (*trace.groups, *ahead)}.values()
        self.numbers = {group.id: number for number, group in enumerate(trace.groups)}

    def agree(self, plan: str, can_follow: Callable[[str], bool]) -> Steps[Outcome]:
        """Agree on a plan with all ranks of the trace's groups.

        ``plan``: what this rank would do. ``can_follow``: whether this rank's graph can launch as
        another's plan says.
        """
        decision = yield from read(f"decision/{self.key}")
        if _is_decided(decision, [self.me]):
            return (yield from self._outcome(decision))
        proposal = _Proposal(self.me, self.trace, plan)
        first = _Proposal.unpack((yield from propose(f"proposal/{self.key}", proposal.pack())))
        if message := _mismatch(self.trace, self.me, first.trace, first.rank):
            return (yield from self._end("ranks differ", message))
        for group in self.watched:
            state = yield from self._post(group)
            if state is not None:
                return (yield from self._end_both(group, state))
            if self.decided.keeps_order(self.trace, self.key):
                return (yield from self._end("traces differ"))
        follows = first.plan == plan or can_follow(first.plan)
        # A vote carries its rank's groups: the last voter finds by them whose votes it needs.
        ballot = json.dumps([[list(group.ranks) for group in self.trace.groups], follows])
        yield from vote(self.key, self.me, ballot)
        votes = yield from self._all_votes()
        if votes is not None:
            return (yield from self._count(votes))
        # After the deadline: ``_end`` appends by swap, so an agreement written before it wins.
        what = f"compile graph {self.trace.graph or self.trace.root} too"
        notice = f"notice/{self.key}/{self.me}"
        if not (yield from wait(notice, what, self.key, self.peers)):
            return (yield from self._end("too late"))
        decision = yield from read(f"decision/{self.key}")
        return (yield from self._outcome(decision))

    def announce(self) -> Steps[None]:
        """Let others know of a trace that keeps the program's order whatever they do; waits for
        nobody.

        Without it, a rank that settles a part of it would wait for this one.
        """
        proposal = _Proposal(self.me, self.trace, PROGRAM)
        yield from propose(f"proposal/{self.key}", proposal.pack())
        yield from _add(self.key, ["traces differ", ""], self.peers)
        yield from _notify(self.key, self.peers)
        yield from self._record_end()

    def _post(self, group: Group) -> Steps[_GroupState | None]:
        """Post the trace on a group's state as the one to decide now, and learn what ended there.

        Returns the state if another trace is undecided there.
        """
        key = f"group/{group.id}"
        own = _GroupState(
            self.key, self.me, int(self.trace.partial), self.numbers.get(group.id, -1)
        )
        held = yield Swap(key, "", own.pack())
        while True:
            state = _GroupState.unpack(held)
            yield from self._read_ended(state)
            if state.now == self.key:
                return None
            if state.now:
                decision = yield from read(f"decision/{state.now}")
                if not _is_decided(decision, group.ranks):
                    return state
                if not _is_agreed(decision, group.ranks):
                    yield from _notify(state.now, group.ranks)
            mine = replace(own, ended=state.ended).pack()
            held = yield Swap(key, held, mine)
            if held == mine:
                return None

    def _record_end(self) -> Steps[None]:
        """Note on all boards that the trace ended, and end what is undecided there and holds
        launches of it.
        """
        for group in self.watched:
            key = f"group/{group.id}"
            held = yield Swap(key, "", _GroupState(ended=(self.key,)).pack())
            while self.key not in (state := _GroupState.unpack(held)).ended:
                more = replace(state, ended=(*state.ended, self.key))
                held = yield Swap(key, held, more.pack())
            yield from self._read_ended(state)
            if state.now not in ("", self.key):
                decision = yield from read(f"decision/{state.now}")
                proposal = _Proposal.unpack((yield from read(f"proposal/{state.now}")))
                if not _is_agreed(decision, group.ranks) and self._is_part(proposal.trace):
                    yield from _add(state.now, ["traces differ", ""], group.ranks)
                    yield from _notify(state.now, {*self.peers, *group.ranks})

    def _is_part(self, other: CollectiveTrace) -> bool:
        if other.is_of(self.trace.root):
            return True
        another_phase = bool(self.trace.launches) and self.trace.backward != other.backward
        return another_phase or shares_launch(self.trace, other)

    def _read_ended(self, state: _GroupState) -> Steps[None]:
        for ended in state.ended:
            if ended != self.key and not self.decided.has(ended):
                proposal = _Proposal.unpack((yield from read(f"proposal/{ended}")))
                self.decided.add(ended, proposal.trace, PROGRAM, ours=False, ended=True)
                self.decided.record_cut(proposal.trace.root)
                if not proposal.trace.launches:
                    self.decided.record_in_python(proposal.trace.root)

    def _end_both(self, group: Group, state: _GroupState) -> Steps[Outcome]:
        """Another rank came to the group with another trace: end both."""
        proposal = _Proposal.unpack((yield from read(f"proposal/{state.now}")))
        message = self._difference(group, state, proposal)
        why: Why = "ranks differ" if message else "traces differ"
        yield from _add(state.now, [why, message], group.ranks)
        yield from _notify(state.now, {*self.peers, *group.ranks})
        return (yield from self._end(why, message))

    def _difference(self, group: Group, state: _GroupState, proposal: _Proposal) -> str:
        """Return a message that shows that the program's ranks do not match; "" if they may."""
        number, other = self.numbers.get(group.id, -1), proposal.trace
        # A rank that runs a function in Python compiles what it calls: launches before that are in
        # no graph.
        if any(
            trace.behind_python or self.decided.is_left_to_python(trace)
            for trace in (self.trace, other)
        ):
            return ""
        # A rank may have run a part of one by a graph of another call. It posts nothing for that,
        # so that its next launches are no sign of another program.
        if any(map(self.decided.has_agreed_part, (self.trace, other))):
            return ""
        # One rank may train where another evaluates, and of a piece of the program the backward
        # follows before the rest.
        if self.trace.is_joint or other.is_joint:
            return ""
        whole = not (self.trace.partial or state.partial)
        # Two whole graphs of one function launch the same, on every group that both ranks are in.
        # Who put the trace down may hold it as a part where who posted it holds it as a whole.
        of_one = whole and not other.partial and _is_one_call(self.trace, other)
        # A backward graph is compiled before its forward one runs: what it launches first says
        # nothing of where a broken program stands, nothing beside a forward graph, and nothing of
        # another call.
        backward = {self.trace.backward, other.backward}
        if not (backward == {False} or (of_one and backward == {True})):
            return ""
        pairs = [(group.name, number, self._theirs(group, state.number, proposal), state.by)]
        if of_one:
            theirs_of = {each.id: i for i, each in enumerate(other.groups) if self.me in each.ranks}
            for i, each in enumerate(self.trace.groups):
                if proposal.rank in each.ranks:
                    theirs = other.on(theirs_of.pop(each.id, -1))
                    pairs.append((each.name, i, theirs, proposal.rank))
            pairs += [
                (other.groups[i].name, -1, other.on(i), proposal.rank) for i in theirs_of.values()
            ]
        for name, i, theirs, rank in pairs:
            mine = self.trace.on(i)
            at = first_difference(mine, theirs)
            if at is None and of_one and len(mine) != len(theirs):
                at = min(len(mine), len(theirs))
            if at is not None:
                return _mismatch_message(
                    name, at, (self.me, self.trace, mine), (rank, other, theirs)
                )
        return ""

    def _theirs(self, group: Group, number: int, proposal: _Proposal) -> list[Launch]:
        """Return what others launch on the proposed trace's ``number``th group, ``group`` here.

        The proposing rank may be of another row of the mesh. Its sizes then do not hold for this
        group and are left out.
        """
        launches = proposal.trace.on(number)
        if proposal.rank in group.ranks:
            return launches
        return [replace(each, payload_bytes=None) for each in launches]

    def _count(self, votes: dict[int, bool]) -> Steps[Outcome]:
        """This rank came last: write what all have voted for."""
        ranks = sorted(votes)
        if not all(votes.values()):
            return (yield from self._end("one cannot", notify=ranks))
        decision = yield from _add(self.key, ["agreed", ranks], ranks)
        yield from _notify(self.key, ranks)
        return (yield from self._outcome(decision))

    def _end(self, why: Why, message: str = "", notify: Iterable[int] = ()) -> Steps[Outcome]:
        """End the trace without a plan, unless it was agreed on in the meantime."""
        decision = yield from _add(self.key, [why, message], [self.me])
        yield from _notify(self.key, notify)
        return (yield from self._outcome(decision))

    def _outcome(self, decision: str) -> Steps[Outcome]:
        """Return a decision's outcome for this rank; without a plan, release peers that wait."""
        if _is_agreed(decision, [self.me]):
            proposal = _Proposal.unpack((yield from read(f"proposal/{self.key}")))
            return Outcome(proposal.plan, "agreed")
        entries = [entry for entry in _entries(decision) if entry[0] != "agreed"]
        message = next((entry[1] for entry in entries if entry[1]), "")
        why: Why = "ranks differ" if message else entries[0][0]
        yield from _notify(self.key, self.peers)
        yield from self._record_end()
        late = self.peers if why == "too late" else ()
        missing = yield from missing_votes(self.key, late)
        return Outcome(PROGRAM, why, message, tuple(missing))

    def _all_votes(self) -> Steps[dict[int, bool] | None]:
        """The votes of all ranks that groups connect with this one; None while any is missing."""
        votes: dict[int, bool] = {}
        pending = {self.me, *self.peers}
        while pending:
            found = yield from gather(self.key, pending)
            if found is None:
                return None
            pending = set()
            for rank, ballot in found.items():
                groups, votes[rank] = _parsed(ballot)
                pending.update(r for group in groups for r in group)
            pending -= votes.keys()
        return votes


def _add(key: str, entry: list[Any], ranks: Iterable[int]) -> Steps[str]:
    """Append an entry to a decision unless ``ranks`` have one; return what the key then holds."""
    decision, wanted, line = "", set(ranks), f"{json.dumps(entry)}\n"
    while True:
        # Another rank may have written in between: try again on its text, so that none is lost.
        found = yield Swap(f"decision/{key}", decision, decision + line)
        if found == decision + line or _is_decided(found, wanted):
            return str(found)
        decision = found


def _entries(decision: str) -> list[Any]:
    return [_parsed(line) for line in decision.splitlines()]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CoordinationError(f"an entry in the store cannot be read: {error}") from error


def _is_decided(decision: str, ranks: Iterable[int]) -> bool:
    """Return whether a decision covers these ranks: a plan that all of them agreed on or an end."""
    return _is_agreed(decision, ranks) or any(entry[0] != "agreed" for entry in _entries(decision))


def _is_agreed(decision: str, ranks: Iterable[int]) -> bool:
    wanted = set(ranks)
    # An agreement holds only for the ranks that voted for it; ranks that no group connects to
    # them agree apart, under the same key.
    return any(entry[0] == "agreed" and wanted <= set(entry[1]) for entry in _entries(decision))


def _is_one_call(one: CollectiveTrace, other: CollectiveTrace) -> bool:
    """Return whether both are of one function as it is called in one place.

    A function that calls others of its own kind, as a container of layers does, may be compiled
    from outside on one rank and from inside on another: then no path is the same.
    """
    paths = {launch.path for launch in one.launches}
    return one.root == other.root and any(launch.path in paths for launch in other.launches)


def _notify(key: str, ranks: Iterable[int]) -> Steps[None]:
    if values := tuple((f"notice/{key}/{rank}", "1") for rank in sorted(ranks)):
        yield Write(values)


def _mismatch(mine: CollectiveTrace, me: int, theirs: CollectiveTrace, rank: int) -> str:
    """Of two graphs with the same trace, whose payloads must be the same too."""
    at = first_difference(mine.launches, theirs.launches)
    if at is None or rank not in mine.groups[mine.launches[at].group].ranks:
        return ""
    number = mine.launches[at].group
    own, other = mine.on(number), theirs.on(number)
    at = first_difference(own, other)
    if at is None:
        return ""
    return _mismatch_message(mine.groups[number].name, at, (me, mine, own), (rank, theirs, other))


_Side = tuple[
    int, CollectiveTrace, Sequence[Launch]
]  # a rank, its trace, its launches on the group


def _mismatch_message(group: str, at: int, mine: _Side, theirs: _Side) -> str:
    def launch(side: _Side) -> str:
        _, trace, on = side
        if at >= len(on):
            return "no further launch" + (f" (in {trace.root})" if trace.root else "")
        return f"'{on[at].text()}'" + (f" ({on[at].line})" if on[at].line else "")

    (me, trace, _), (rank, _, _) = mine, theirs
    return (
        f"Ranks {rank} and {me} would launch different collectives on group {group!r} in graph "
        f"{trace.graph or trace.root}: launch {at} is {launch(theirs)} on rank {rank} and "
        f"{launch(mine)} on rank {me}."
    )
