"""What ranks that tune settle with each other: each time all do the same, or a rank that cannot know ends with an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from dynamo_dist.errors import TuneError
from inductor_passes.agree.orders import Orders
from inductor_passes.agree.share import Shared, fail, share
from inductor_passes.agree.store import ReadAll, Steps, StoreFailedError, Write
from inductor_passes.attach import measured
from inductor_passes.machine.times.times import Times
from inductor_passes.torch_compat import c10d


class StoppedError(Exception):
    """Ranks have settled not to go on; the message says why."""


class LostError(TuneError):
    """This rank does not know what the others do."""


def _write(key: str, text: str) -> Steps[None]:
    yield Write(((key, text),))


def _read(keys: tuple[str, ...]) -> Steps[list[str] | None]:
    found: list[str] | None = yield ReadAll(keys)
    return found


class Meetings:
    """Meetings of all ranks under one name, and the switch of costs that they agree on.

    ``before``: the tables that counted before. Whoever goes back does so once, under one name, wherever it was when it did.
    """

    def __init__(self, job: Orders, name: str) -> None:
        self.job, self.name = job, name
        self.rank, self.world = c10d.global_rank(), c10d.world_size() or 1
        self.before: Mapping[str, Times] = dict(measured.adopted())
        self._switched = False
        self._steps = 0

    def share(self, what: str, mine: str, make: Callable[[Mapping[int, str]], str]) -> Shared:
        """One text for all ranks, or none for any. Raises LostError, which no other rank hears of."""
        name = f"{self.name}/{what}"
        try:
            return self.job.ask(share(self.rank, self.world, name, mine, make))
        except StoreFailedError as error:
            raise self._lost(error) from error

    def agreed(self, what: str, mine: str, make: Callable[[Mapping[int, str]], str]) -> str:
        """As ``share``; raises StoppedError where there is none."""
        found = self.share(what, mine, make)
        if found.text is None:
            raise StoppedError(found.why)
        return found.text

    def before_step(self, word: str = "") -> str:
        """Go on once all ranks have come, with the word that one of them has said, if any. Raises StoppedError if one does not."""
        said = self.agreed(self._next, word, lambda of_ranks: max(of_ranks.values()))
        self._steps += 1
        return said

    @property
    def _next(self) -> str:
        return f"step {self._steps}"

    @contextlib.contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Let the others know at the next meeting, or at ``what``, if the block fails here."""
        try:
            yield
        except (StoppedError, LostError):
            raise
        except BaseException as error:
            self.tell(what, f"{type(error).__name__}: {error}")
            raise

    def tell(self, what: str, why: str) -> None:
        """Tell the others that this rank does not come to ``what``, nor to the next step."""
        for where in (what, self._next):
            with contextlib.suppress(StoreFailedError):  # then they wait in vain, and stop
                self.job.ask(fail(self.rank, f"{self.name}/{where}", why))

    def say(self, what: str, text: str) -> None:
        """Put down a word of this rank's."""
        with contextlib.suppress(StoreFailedError):  # others find it missing
            self.job.ask(_write(f"{self.name}/{what}/{self.rank}", text))

    def all_say(self, what: str, text: str) -> bool:
        """Return whether all ranks have put down this word; waits for none."""
        keys = tuple(f"{self.name}/{what}/{rank}" for rank in range(self.world))
        try:
            found = self.job.ask(_read(keys))
        except StoreFailedError as error:
            raise self._lost(error) from error
        return found is not None and set(found) == {text}

    def switch(self, tables: Mapping[str, Times]) -> None:
        """Price by these tables from the next call on, as all ranks do now. Raises LostError."""
        self._switched = True
        self._begin_anew({**self.before, **tables}, "tuned")

    def back(self) -> None:
        """Price as before the switch, if there was one."""
        if self._switched:
            self._switched = False
            self._begin_anew(self.before, "back")

    def _begin_anew(self, tables: Mapping[str, Times], word: str) -> None:
        measured.adopt(tables)
        try:
            self.job.begin_anew(f"{self.name}/{word}")
        except StoreFailedError as error:
            raise self._lost(error) from error

    def _lost(self, error: StoreFailedError) -> LostError:
        found = LostError(
            f"Rank {self.rank} does not know what the other ranks settled on while they tuned: the job's store failed "
            f"({error}).",
            "They may go on by other costs, and launch in another order than this rank would.",
            "End the job and start it again. The store is the one that init_process_group met at; with env:// it is "
            "that of MASTER_ADDR and MASTER_PORT, on rank 0.",
        )
        self.job.lose(str(found))
        return found
