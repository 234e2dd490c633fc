"""Let one rank compile a graph while ranks with the same key wait for it, through the job's store.

The first rank that misses a key in the cache claims it and *beats* while it compiles: it counts up
a number. The others watch this number by their own clocks. A rank whose number stands still has
died or stopped. The next rank then takes its place, in a *turn* of its own.

A rank that waits votes meanwhile on the order of the graph's launches, because the compiling rank
waits for its vote. The graphs are equal, so it votes as the compiling rank does. It reads that
rank's trace, plan and answers. A joint graph and its halves are one graph here, with three
traces.

Groups of other rows of a mesh may have agreed on something else. A waiting rank may then need an
answer for which the compiling rank is never asked. It finds this out by compiling itself.

A rank waits for no launch here, and the compiling rank needs only its vote. A failure of the store
costs a compile and nothing else.

Every wait ends. A beat also says how often the compile has entered other functions of Python, so
that a compile that hangs shows while it beats. A rank compiles for itself after one deadline
without a change, or after ten deadlines in all. It does not wait for that rank again before that
rank has ended a turn.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from inductor_passes.ranks.collective_trace import PROGRAM, CollectiveTrace, digest
from inductor_passes.ranks.coordination import SAY_S, Coordination, CoordinationError
from inductor_passes.ranks.decision import Offer
from inductor_passes.torch_compat import dynamo

log = logging.getLogger(__name__)

APART = "compile/folders apart"
BEAT_S = 0.5
SILENT_S = 10.0  # a rank that has not beaten for so long compiles no more
LOOK_S = 0.05
VERDICT_S = 5.0  # for an answer that the compiling rank may never be asked for
STILL_S = 30.0  # a compile that comes to no other function for so long may hang
LONG_S = 60.0  # what is waited for longer is a warning
MOST_STILL = 10  # times as long, a compile is waited for at all
MOST_BYTES = 32 * 2**20  # of an entry that goes through the store

# Ranks that this one has given up: silent ones, whose place others take, and ones that beat and
# come to no end. A rank that died, or hangs, holds the keys of all that its compile consists of,
# and each would be waited for. Who is seen to beat, or to end a turn, leaves them.
_silent: set[int] = set()
_late: set[int] = set()


@dataclass(frozen=True, slots=True)
class Turn:
    """One rank's turn at a key. ``folder``: a file in its cache folder, by which others know
    whether it is theirs too.
    """

    key: str
    number: int
    rank: int
    folder: str

    def text(self) -> str:
        return f"{self.number} {self.rank} {self.folder}"

    @classmethod
    def of(cls, key: str, text: str) -> Turn:
        """Inverse of ``text``. Raises CoordinationError for anything else."""
        try:
            number, rank, folder = text.split(" ")
            return cls(key, int(number), int(rank), folder)
        except ValueError as error:
            raise CoordinationError(f"a claim in the store cannot be read: {error}") from error

    def at(self, name: str) -> str:
        """Return the key of the store that holds something of this turn."""
        return f"compile/{self.key}/{self.number}/{name}"


@dataclass(frozen=True, slots=True)
class End:
    """How a turn ended: ``digest`` is that of the entry, "" if there is none to be had."""

    digest: str = ""


class Claim:
    """This rank's turn: it compiles. ``end`` it, whatever comes."""

    def __init__(self, job: Coordination, turn: Turn) -> None:
        self._job, self.turn = job, turn
        self._traces = 0
        self._compiling = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="inductor_passes beat", daemon=True).start()

    def _beat(self) -> None:
        try:
            job = self._job.connection()
            number = moves = 0
            at: list[object] = []
            while not self._over.wait(BEAT_S if number else 0.0):
                number += 1
                before, at = at, self._functions()
                moves += at != before
                job.write(self.turn.at("beat"), f"{number} {moves}")
        except CoordinationError as error:
            log.info("The job's store took no beat: %s", error)

    def _functions(self) -> list[object]:
        """List the functions that the compile is in. Not the lines: a loop that never ends goes
        from line to line.
        """
        found: list[object] = []
        frame = sys._current_frames().get(self._compiling)
        while frame is not None:
            found.append(frame.f_code)
            frame = frame.f_back
        return found

    def publish(self, name: str, value: str | bytes) -> None:
        """Let waiting ranks read something of this turn."""
        try:
            self._job.write(self.turn.at(name), value)
        except CoordinationError as error:
            log.info("The job's store did not take %s: %s", name, error)

    def offers(self, trace: CollectiveTrace, offer: Offer) -> Offer:
        """``offer``, whose answers waiting ranks give too."""
        number, self._traces = self._traces, self._traces + 1
        self.publish(f"trace/{number}", json.dumps(trace.to_json()))
        return _Published(self, offer, number)

    def is_wanted(self) -> bool:
        """Return whether some rank has another cache folder: one that waits for this graph, or
        waited for one before.
        """
        try:
            return any(map(self._job.has, (self.turn.at("want"), APART)))
        except CoordinationError:
            return False

    def end(self, digest: str, entry: bytes | None) -> None:
        """The turn is over. ``digest``: of the entry, "" if there is none; ``entry``: itself,
        where it is wanted.
        """
        self._over.set()
        if entry is not None and len(entry) <= MOST_BYTES:
            self.publish("entry", entry)
        self.publish("end", digest or "-")


class _Published:
    def __init__(self, claim: Claim, offer: Offer, number: int) -> None:
        self._claim, self._offer, self._number = claim, offer, number

    def plan(self) -> str:
        plan = self._offer.plan()
        self._claim.publish(f"plan/{self._number}", plan)
        return plan

    def can_follow(self, plan: str) -> bool:
        found = self._offer.can_follow(plan)
        self._claim.publish(f"follows/{self._number}/{digest(plan)}", str(int(found)))
        return found


def claim(job: Coordination, key: str, rank: int, folder: str) -> Claim | Turn:
    """Claim a key; returns another rank's turn where it was claimed before. Raises
    CoordinationError.
    """
    mine = Turn(key, 0, rank, folder)
    held = job.propose(f"compile/{key}", mine.text())
    return Claim(job, mine) if held == mine.text() else Turn.of(key, held)


class Waiting:
    """A rank that waits for another's turn to end.

    ``vote``: votes on a trace of launches as the offer that it gets says; called for each, in
        order.
    ``still_s``: how long a compile without a change is waited for.
    """

    def __init__(
        self,
        job: Coordination,
        turn: Turn,
        rank: int,
        folder: str,
        vote: Callable[[CollectiveTrace, Offer], object],
        clock: Callable[[], float] = time.monotonic,
        still_s: float | None = None,
    ) -> None:
        self._job, self.turn, self._rank, self._folder = job, turn, rank, folder
        self._vote, self._clock = vote, clock
        self._still_s = STILL_S if still_s is None else still_s
        self._votes = 0  # also for who takes over: it comes to the same traces
        self._said_at = clock()
        self._begin()

    def _begin(self) -> None:
        """A turn is waited for from now on."""
        self._began_at = self._moved_at = self._seen_at = self._clock()
        self._seen = self._moves = ""

    def want(self) -> None:
        """Ask for the entry through the store."""
        self._job.write(self.turn.at("want"), "1")
        self._job.write(APART, "1")  # who has a graph done before the others come to it is to know

    def entry(self) -> bytes | None:
        """Return the entry that this rank has asked for, if it was sent."""
        return self._job.read(self.turn.at("entry"))

    def outcome(self) -> End | Claim:
        """How the turn ended, or the claim of this rank that takes the place of one that is silent.

        Raises CoordinationError.
        """
        with dynamo.waiting("compile"):
            return self._outcome()

    def _outcome(self) -> End | Claim:
        while True:
            if (end := self._read("end")) is not None:
                _late.discard(self.turn.rank)
                return End(end.removeprefix("-"))
            if (text := self._read(f"trace/{self._votes}")) is not None:
                number, self._votes = self._votes, self._votes + 1
                try:
                    self._vote(_trace_of(text), _Mirrored(self, number))
                except _NoAnswerError as error:
                    if not (self.has_ended() or self.is_silent() or self.is_late()):
                        log.info("Rank %d launches otherwise: %s.", self.turn.rank, error)
                        return End()
                self._begin()  # the vote waited for others
            if self.is_silent():
                found = self._take_over()
                if found is not None:
                    return found
            elif self.is_late():
                return End()
            self._say()
            time.sleep(LOOK_S)

    def is_silent(self) -> bool:
        """Return whether the rank that compiles has stopped to beat."""
        beat, now, rank = self._read("beat") or "", self._clock(), self.turn.rank
        if beat != self._seen:
            if self._seen:
                _silent.discard(rank)
            self._seen, self._seen_at = beat, now
            _, _, moves = beat.partition(" ")
            if moves != self._moves:
                self._moves, self._moved_at = moves, now
        # One that was silent before is waited for no longer than shows whether it beats again.
        return now - self._seen_at > (min(SILENT_S, 4 * BEAT_S) if rank in _silent else SILENT_S)

    def is_late(self) -> bool:
        """Return whether the rank that compiles beats and comes to no end; said once, for all
        that it compiles.
        """
        now, rank = self._clock(), self.turn.rank
        if rank in _late:
            return True
        still, all_s = now - self._moved_at, now - self._began_at
        if still <= self._still_s and all_s <= MOST_STILL * self._still_s:
            return False
        _late.add(rank)
        log.warning(
            "Rank %d has been compiling a graph for %.0f s, %.0f s of them in one function: this "
            "rank compiles it for "
            "itself, and waits for that rank no more until it is done.",
            rank,
            all_s,
            still,
        )
        return True

    def _say(self) -> None:
        now = self._clock()
        if now - self._said_at >= SAY_S:
            self._said_at, waited_s = now, now - self._began_at
            log.log(
                logging.INFO if waited_s < LONG_S else logging.WARNING,
                "Waiting for rank %d, which has been compiling a graph for %.0f s.",
                self.turn.rank,
                waited_s,
            )

    def has_ended(self) -> bool:
        return self._read("end") is not None

    def _take_over(self) -> Claim | None:
        held = self.turn
        mine = Turn(held.key, held.number + 1, self._rank, self._folder)
        now = self._job.swap(f"compile/{held.key}", held.text(), mine.text())
        _silent.add(held.rank)
        if now == mine.text():
            log.warning(
                "Rank %d has not gone on compiling a graph for %.0f s: this rank compiles it.",
                held.rank,
                self._clock() - self._seen_at,
            )
            return Claim(self._job, mine)
        self.turn = Turn.of(held.key, now)
        self._begin()
        return None

    def _read(self, name: str) -> str | None:
        found = self._job.read(self.turn.at(name))
        return None if found is None else found.decode()


class _NoAnswerError(Exception):
    """Nobody asks the rank that compiles what this rank must know; caught by ``Waiting``."""


class _Mirrored:
    """The answers of the rank that compiles an equal graph. Raises _NoAnswerError where it has
    none.
    """

    def __init__(self, waiting: Waiting, number: int) -> None:
        self._waiting, self._number = waiting, number
        self._plan: str | None = None

    def plan(self) -> str:
        self._plan = self._await(f"plan/{self._number}") or PROGRAM
        return self._plan

    def can_follow(self, plan: str) -> bool:
        if plan in (PROGRAM, self._plan):
            return True
        answer = self._await(f"follows/{self._number}/{digest(plan)}", VERDICT_S)
        if answer is None:
            raise _NoAnswerError(f"nobody has asked it whether its graph can follow {plan}")
        return answer == "1"

    def _await(self, name: str, most_s: float = float("inf")) -> str | None:
        end = time.monotonic() + most_s
        while (text := self._waiting._read(name)) is None:
            waiting = self._waiting
            is_over = waiting.has_ended() or waiting.is_silent() or waiting.is_late()
            if is_over or time.monotonic() > end:
                return self._waiting._read(name)
            time.sleep(LOOK_S)
        return text


def _trace_of(text: str) -> CollectiveTrace:
    try:
        return CollectiveTrace.from_json(json.loads(text))
    except ValueError as error:
        raise CoordinationError(f"a trace in the store cannot be read: {error}") from error
