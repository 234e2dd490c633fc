"""Coordinate the ranks of a job through its store: propose, vote, gather, wait.

All that ranks agree on goes through here: the collective order of a graph, which rank compiles a
graph for others, and whether all ranks can run a wrapper's forward in a graph. The rules are the
same for all of it:

- Keys stand under one prefix. They are made of what is the same on all ranks.
- The first value that a rank proposes for a key stays.
- Every wait has a deadline. A rank that waits logs every ten seconds for whom.
- An operation that the store refuses is tried again. Then it raises CoordinationError.

A protocol is a generator of operations, so that a model can run it step by step and in any
interleaving of ranks. ``Coordination.run`` carries it out on the job's store.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from inductor_passes.errors import OptionError, PassesError
from inductor_passes.torch_compat import c10d, dynamo
from inductor_passes.torch_compat.c10d import Store

log = logging.getLogger(__name__)

PREFIX = "inductor_passes/"
SECONDS = "INDUCTOR_PASSES_AGREEMENT_SECONDS"
SAY_S = 10.0  # how often a rank that waits says for whom
# Seconds between the tries of an operation that the store refuses: what it may have done before it
# failed does no harm when it is done again.
PAUSES_S = (0.05, 0.2, 0.5)


class CoordinationError(PassesError):
    """The job's store failed, or holds what nobody of this version wrote."""


def deadline_s(environ: Mapping[str, str] | None = None) -> float:
    """Return for how many seconds a rank waits for others; with 0, ranks do not coordinate.

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
            "Set it to a number of at least 0; with 0 ranks agree on nothing, and collectives keep "
            "the program's order.",
        )
    return number


@dataclass(frozen=True, slots=True)
class Swap:
    """Write ``new`` if the key holds ``old``; a key that nobody wrote holds "". Answers what it
    holds then.
    """

    key: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write several keys. Answers nothing."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadAll:
    """The values of several keys, or None if any of them was not written."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a key is written, for as long as the deadline allows. Answers whether it was.

    ``what``: the subject of the wait, for the log. ``of``: ranks, and the key that each of them
    writes: those without it are waited for.
    """

    key: str
    what: str = ""
    of: tuple[tuple[int, str], ...] = ()


Operation = Swap | Write | ReadAll | Await
T = TypeVar("T")
Steps = Generator[Operation, Any, T]


def propose(key: str, value: str) -> Steps[str]:
    """Propose a value for a key; return the one that was proposed first."""
    held: str = yield Swap(key, "", value)
    return held


def read(key: str) -> Steps[str]:
    """Return the value of a key, "" if nobody wrote it. Not for keys that ranks wait for: the
    store then holds the key, empty.
    """
    value: str = yield Swap(key, "", "")
    return value


def vote(key: str, rank: int, value: str) -> Steps[None]:
    """Cast this rank's vote."""
    yield Write(((_vote_key(key, rank), value),))


def gather(key: str, ranks: Iterable[int]) -> Steps[dict[int, str] | None]:
    """Return the votes of these ranks; None while any is missing."""
    wanted = sorted(ranks)
    found = yield ReadAll(tuple(_vote_key(key, rank) for rank in wanted))
    return None if found is None else dict(zip(wanted, found, strict=True))


def missing_votes(key: str, ranks: Iterable[int]) -> Steps[list[int]]:
    """Return which of these ranks have not voted."""
    missing = []
    for rank in sorted(ranks):
        if (yield ReadAll((_vote_key(key, rank),))) is None:
            missing.append(rank)
    return missing


def wait(key: str, what: str, votes: str, ranks: Iterable[int]) -> Steps[bool]:
    """Wait until a key is written, by ranks that vote on ``votes``; return False at the deadline.

    ``what``: of the wait, for the log.
    """
    of = tuple((rank, _vote_key(votes, rank)) for rank in sorted(ranks))
    written: bool = yield Await(key, what, of)
    return written


def _vote_key(key: str, rank: int) -> str:
    return f"vote/{key}/{rank}"


Verdict = Literal["all", "not all", "different"]
ALL: Final = "all"
NOT_ALL: Final = "not all"
DIFFERENT: Final = "different"


def unanimous(
    key: str, what: str, me: int, ranks: Sequence[int], can: bool, how: str = ""
) -> Steps[Verdict]:
    """Return ALL if every rank of ``ranks`` can do something, the same on all of them.

    Each rank asks once for a key. A rank that cannot ends the waiting of the others: NOT_ALL. It is
    NOT_ALL too if some do not come before the deadline, and DIFFERENT if ranks that can give
    different values of ``how``. ``what``: what they can, for the log.
    """
    decision = f"decision/{key}"
    # The first verdict stays, and all ranks return it: also one that comes after others have given
    # up waiting for it.
    if not can:
        yield from propose(decision, NOT_ALL)
    elif (yield from propose(f"how/{key}", f"how {how}")) != f"how {how}":
        yield from propose(decision, DIFFERENT)
    else:
        yield from vote(key, me, "")
        if (yield from gather(key, ranks)) is not None:
            yield from propose(decision, ALL)
    if not (yield from wait(decision, what, key, ranks)):
        missing = yield from missing_votes(key, ranks)
        if (yield from propose(decision, NOT_ALL)) == NOT_ALL:
            log.warning("Before the deadline, %s did not %s.", _named(missing), what)
    (verdict,) = yield ReadAll((decision,))
    if verdict not in (ALL, NOT_ALL, DIFFERENT):
        raise CoordinationError(f"a verdict in the store cannot be read: {verdict!r}")
    return verdict


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Coordination:
    """Carry out operations on a job's store. Every method raises CoordinationError for what the
    store raises again and again. ``among``: begins the keys of ranks that coordinate apart from
    others.
    """

    def __init__(
        self, store: Store, among: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._among, self._clock = store, among, clock
        self._prefix = PREFIX + among

    def connection(self) -> Coordination:
        """Return one with a connection of its own, for another thread, where the store has such."""
        return Coordination(c10d.own_connection(self._store), self._among, self._clock)

    def run(self, steps: Steps[T], deadline_s: float) -> T:
        """Carry out a protocol. All its waits together end ``deadline_s`` after the first began."""
        end: float | None = None
        answer: Any = None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            if isinstance(operation, Await) and end is None:
                end = self._clock() + deadline_s
            try:
                answer = self._do(operation, end)
            except CoordinationError:
                steps.close()
                raise

    def propose(self, key: str, value: str) -> str:
        """Propose a value for a key; return the one that was proposed first."""
        return self.swap(key, "", value)

    def swap(self, key: str, old: str, new: str) -> str:
        """Write ``new`` if the key holds ``old``; return what it holds then."""
        found: bytes = self._again(lambda: self._store.compare_set(self._prefix + key, old, new))
        return found.decode()

    def write(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._again(lambda: self._store.set(self._prefix + key, value))

    def read(self, key: str) -> bytes | None:
        """Return the value of a key; None if nobody wrote it."""
        found: list[bytes] | None = self._again(lambda: self._read_all((key,)))
        return None if found is None else found[0]

    def has(self, key: str) -> bool:
        """Return whether somebody wrote a key."""
        found: bool = self._again(lambda: self._store.check([self._prefix + key]))
        return found

    def _do(self, operation: Operation, end: float | None) -> Any:
        if isinstance(operation, Swap):
            return self.swap(operation.key, operation.old, operation.new)
        if isinstance(operation, Write):
            return self._again(lambda: self._write_all(operation.values))
        if isinstance(operation, ReadAll):
            found = self._again(lambda: self._read_all(operation.keys))
            return None if found is None else [value.decode() for value in found]
        assert end is not None
        with dynamo.waiting("votes"):
            return self._await(operation, end)

    def _again(self, operation: Callable[[], Any]) -> Any:
        for pause_s in (*PAUSES_S, None):
            try:
                return operation()
            except (RuntimeError, OSError, ValueError) as error:
                if pause_s is None:
                    raise CoordinationError(f"{type(error).__name__}: {error}") from error
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _await(self, operation: Await, end: float) -> bool:
        began = asked = self._clock()
        pauses = iter(PAUSES_S)
        while True:
            now = self._clock()
            left_s = max(0.001, min(end - now, asked + SAY_S - now))
            try:
                timeout = datetime.timedelta(seconds=left_s)
                self._store.wait([self._prefix + operation.key], timeout)
            except RuntimeError:  # how stores say that time is up, and that they fail
                now = self._clock()
                if now >= end:
                    return False
                if now >= asked + SAY_S:
                    asked, pauses = now, iter(PAUSES_S)
                    self._say(operation, now - began, end - began)
                    continue
                # Before its time is up: the store rounds down, or it fails. One that goes on
                # failing raises at the next step.
                if (pause_s := next(pauses, None)) is None or now + pause_s >= end:
                    return False
                time.sleep(pause_s)
            else:
                return True

    def _say(self, operation: Await, waited_s: float, most_s: float) -> None:
        missing = [rank for rank, key in operation.of if not self.has(key)]
        log.warning(
            "Waiting for %s to %s: %.0f s of at most %.0f s.",
            _named(missing) if missing else "other ranks",
            operation.what or "decide",
            waited_s,
            most_s,
        )

    def _write_all(self, values: Sequence[tuple[str, str]]) -> None:
        if len(values) > 1 and c10d.has_many(self._store):
            store: Any = self._store
            store.multi_set(
                [self._prefix + key for key, _ in values], [value for _, value in values]
            )
            return
        for key, value in values:
            self._store.set(self._prefix + key, value)

    def _read_all(self, keys: Sequence[str]) -> list[bytes] | None:
        names = [self._prefix + key for key in keys]
        if not self._store.check(names):
            return None
        if len(names) > 1 and c10d.has_many(self._store):
            found: list[bytes] = self._store.multi_get(names)  # type: ignore[attr-defined]
            return found
        return [self._store.get(name) for name in names]
