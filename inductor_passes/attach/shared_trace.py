"""``options={"compile": "shared"}`` for a whole program: of ranks that have traced the same graph, one makes code of it.

Each rank traces, by which it has its own guards and errors, and a number in its graph for all that it read of its rank. Ranks
whose joint graphs have one digest (``traced.py``) then do the rest once: passes, partition, lowering of forward and backward.
The others get AOTAutograd's entry, with meshes of their own in it, and find it in their cache.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.agree import orders
from inductor_passes.agree.compile_once import FAILURES, MOST_BYTES, Claim, Turn, Waiting, claim
from inductor_passes.agree.decide import Offer
from inductor_passes.agree.stream import Stream
from inductor_passes.attach import shared, uneven
from inductor_passes.attach.traced import NoDigestError, TracedProgram
from inductor_passes.errors import RanksDifferError
from inductor_passes.kernels import availability
from inductor_passes.torch_compat import aot, c10d, caches, config, dynamo, entry_pickles

log = logging.getLogger(__name__)
T = TypeVar("T")
_current: contextvars.ContextVar[SharedTrace | None] = contextvars.ContextVar(
    "shared trace", default=None
)


class Made(BaseException):
    """Another rank has made code of the graph that is being compiled, and it is in the cache now. No error: nothing but its caller may catch it."""


class SharedTrace:
    """One compile of a graph that other ranks may have traced too. ``made_by``: the rank that made its code; None if it is this one."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        about: object,
        is_alike: Callable[[fx.GraphModule], bool],
        entries: caches.TracedEntries,
    ) -> None:
        self._store, self._rank, self._about, self._entries = store, rank, about, entries
        self._is_alike = is_alike
        self._asked = False
        self._claim: Claim | None = None
        self._graphs: dict[str, None] = {}
        self.is_rank_free = True  # what was made of it so far
        self.made_by: int | None = None

    def ask(self, joint: fx.GraphModule, how: Mapping[str, Any]) -> None:
        """Let one rank go on with a joint graph. Raises Made where another has."""
        is_first, self._asked = not self._asked, True
        # Without the key AOTAutograd keeps no entry; a graph inside another is partitioned without the indices.
        if not (is_first and self._entries.key and "static_lifetime_input_indices" in how):
            return
        if not self._is_alike(joint):
            return
        unlike = (uneven.is_rank_dependent(), uneven.has_uneven_inputs())
        facts = (self._about, dict(how), dynamo.metadata_in_work(), unlike, config.digests())
        try:
            traced = TracedProgram(joint, *facts)
        except NoDigestError as error:
            log.info(
                "This rank compiles for itself: nothing tells its graph from others (%s).", error
            )
            return
        try:
            mark = shared.leave_mark()
            found = claim(self._store, f"traced/{traced.digest}", self._rank, mark or "-")
            if isinstance(found, Claim):
                self._claim = found
            elif found.rank != self._rank:
                self._wait(found, mark, traced.meshes)
        except RanksDifferError:  # what the vote came to
            raise
        except FAILURES as error:
            log.warning("The job's store failed: this rank compiles by itself (%s).", error)

    def _wait(self, turn: Turn, mark: str, meshes: Mapping[str, DeviceMesh]) -> None:
        log.info("Rank %d compiles this program: waiting for it.", turn.rank)
        waiting = Waiting(self._store, turn, self._rank, mark or "-", shared.vote)
        if not shared.is_here(turn.folder):
            waiting.want()
        outcome = waiting.outcome()
        if isinstance(outcome, Claim):
            self._claim = outcome
            return
        content = waiting.entry() if outcome.digest else None
        if content is None or hashlib.sha256(content).hexdigest() != outcome.digest:
            log.info("Rank %d has nothing for this one: compiling.", waiting.turn.rank)
            return
        try:
            entry, graphs = _unpacked(content)
            entry_pickles.put_own_entry(self._entries.key, entry, meshes)
            placed = all(caches.put_entry(key, each) for key, each in graphs.items())
        except (
            Exception
        ) as error:  # of bytes that are another torch's, a mesh that is not here, a disk
            log.info(
                "What rank %d made does not fit here: compiling (%r).", waiting.turn.rank, error
            )
            return
        if placed:
            self.made_by = waiting.turn.rank
            raise Made

    def offers(self, stream: Stream, offer: Offer) -> Offer:
        """``offer``, also for ranks that wait."""
        return offer if self._claim is None else self._claim.offers(shared.alike(stream), offer)

    def compiled(self, key: str, is_rank_free: bool) -> None:
        """Note a graph of Inductor's that was made on the way, by its key in the cache."""
        self.is_rank_free = self.is_rank_free and is_rank_free
        if key:
            self._graphs[key] = None

    def end(self) -> None:
        """Say what came of this rank's turn, if it had one."""
        if self._claim is None:
            return
        entry = self._entries.made() if self.is_rank_free else None
        content = None
        if entry is not None:
            wanted = self._graphs if self._claim.is_wanted() else {}
            graphs = {key: caches.newest_entry(key) for key in wanted}
            content = _packed(entry, {key: each for key, each in graphs.items() if each})
        if content is None or len(content) > MOST_BYTES:
            self._claim.end("", None)
        else:
            self._claim.end(hashlib.sha256(content).hexdigest(), content)


def made_once(
    wanted: bool, about: object, is_alike: Callable[[fx.GraphModule], bool], make: Callable[[], T]
) -> tuple[T, int | None]:
    """Return what ``make`` compiles, or finds in the cache once another rank has made it; and that rank, if it was so.

    ``about``: what the code depends on beside the graph. ``is_alike``: whether a joint graph makes equal code on all ranks that have it.
    """
    store = c10d.job_store() if wanted and not orders.salt() else None
    if store is None or (c10d.world_size() or 1) < 2 or not availability.why_not_here():
        return make(), None
    with caches.traced_entries() as entries:
        sharing = SharedTrace(store, c10d.global_rank(), about, is_alike, entries)
        token = _current.set(sharing)
        try:
            with aot.before_partition(sharing.ask):
                return make(), None
        except Made:
            log.info("Rank %s has made the code of this program.", sharing.made_by)
        finally:
            _current.reset(token)
            sharing.end()
    return make(), sharing.made_by


def offers_of_all(stream: Stream, offer: Offer) -> Offer:
    """``offer`` of the graph in work, which ranks that wait for it, or for the program that it is of, give too."""
    sharing = _current.get()
    return shared.offers(stream, offer if sharing is None else sharing.offers(stream, offer))


def compiled(key: str, is_rank_free: bool) -> None:
    """Note a graph of Inductor's, of the program in work."""
    if (sharing := _current.get()) is not None:
        sharing.compiled(key, is_rank_free)


def _packed(entry: bytes, graphs: Mapping[str, bytes]) -> bytes:
    sizes = [[key, len(each)] for key, each in graphs.items()]
    head = json.dumps([len(entry), sizes]).encode()
    return b"".join((len(head).to_bytes(8, "big"), head, entry, *graphs.values()))


def _unpacked(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Inverse of ``_packed``."""
    start = 8 + int.from_bytes(content[:8], "big")
    size, sizes = json.loads(content[8:start])

    def pieces() -> Iterator[bytes]:
        at = start
        for each in (size, *(number for _, number in sizes)):
            yield content[at : at + each]
            at += each

    entry, *graphs = pieces()
    return entry, dict(zip((key for key, _ in sizes), graphs, strict=True))
