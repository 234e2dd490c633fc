"""Share one rank's compile of a whole program among the ranks with equal graphs.

Each rank traces with Dynamo, so that each has its own guards and errors. Its graph holds a number
for all that the program read of its rank. Ranks whose graphs then have one digest
(``UntracedProgram``) wait for the first of them, which traces on with AOTAutograd.

If that rank does not read its rank meanwhile (``rank_reads.py``), the others would trace the same,
and get what it makes. Otherwise each traces on too. Ranks whose joint graphs have one digest
(``TracedProgram``) do the rest once: passes, partition, lowering of forward and backward. The
others get AOTAutograd's entry, with meshes of their own in it, and find it in their cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes import registry
from inductor_passes.inductor import local_graphs, shared_compile
from inductor_passes.inductor.cache_keys import NoDigestError, TracedProgram
from inductor_passes.inductor.local_graphs import graphs_inside, leaves_of_value
from inductor_passes.ranks.collective_trace import CollectiveTrace
from inductor_passes.ranks.compile_once import MOST_BYTES, Claim, Turn, claim
from inductor_passes.ranks.coordination import Coordination, CoordinationError
from inductor_passes.ranks.decision import Offer
from inductor_passes.torch_compat import aot, c10d, caches, dynamo, inductor, meshes, rank_reads
from inductor_passes.torch_compat.nodes import higher_order_name, is_random, namespace, size_hint

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession


class UntracedProgram:
    """A Dynamo graph and its inputs, fake or real, local in DTensors."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._gm, self._inputs = gm, inputs

    def is_known(self) -> bool:
        """Return whether no user code runs while the graph is traced again.

        Operators, and the functions that decide their layouts, must be torch's or ours.
        """
        return (
            rank_reads.can_notice()
            and all(rank_reads.is_known(type(each)) for each in self._inputs)
            and all(_is_known(node) for graph in graphs_inside(self._gm) for node in graph.nodes)
            and rank_reads.strategies_are_known()
        )

    def digest(self, key: str, *facts: object) -> str:
        """Return a digest of torch's ``key`` of it without the rank, and of what is not in that:
        ``facts``, hints, shards, options.
        """
        inputs = [_text(each) for each in self._inputs]
        return hashlib.sha256(repr((key, facts, inputs, inductor.digests())).encode()).hexdigest()

    def meshes(self) -> dict[str, DeviceMesh]:
        """Meshes that are met in it, by what they hold beside the rank's place."""
        found = list(self._inputs)
        for graph in graphs_inside(self._gm):
            found += [node.meta.get("example_value") for node in graph.nodes]
        of_values = (_mesh(each) for value in found for each in leaves_of_value(value))
        return {meshes.content(mesh, of_rank=False): mesh for mesh in of_values if mesh is not None}


def draws_numbers(gm: fx.GraphModule) -> bool:
    """Return whether a graph of operators draws random numbers: what ranks draw is looked at as
    each traces.
    """
    return any(is_random(node) for graph in graphs_inside(gm) for node in graph.nodes)


def _is_known(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_module":
        owner = node.graph.owning_module
        return owner is not None and isinstance(owner.get_submodule(target), fx.GraphModule)
    if node.op != "call_function":
        return True
    if (name := namespace(target)) is not None:
        # What AOTAutograd runs of others may read anything.
        return rank_reads.is_known_namespace(name)
    is_operator = higher_order_name(target) is not None
    return rank_reads.is_known(type(target) if is_operator else target)


def _text(value: Any) -> str:
    """Return what torch's key leaves out of an input: the hint of a symbol, the local part of a
    DTensor.
    """
    if isinstance(value, torch.SymInt):
        return f"{value} {size_hint(value)}"
    tensor = meshes.local_of(value)
    if not isinstance(tensor, torch.Tensor):
        return type(value).__name__
    sizes = [
        f"{size} {size_hint(size)}" if isinstance(size, torch.SymInt) else str(size)
        for size in (*tensor.shape, *tensor.stride())
    ]
    return f"{type(value).__name__} {sizes} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


def _mesh(value: object) -> DeviceMesh | None:
    spec = meshes.spec_of(value)
    return meshes.mesh_of(value if spec is None else spec.mesh)


log = logging.getLogger(__name__)
T = TypeVar("T")


class CompiledElsewhere(BaseException):
    """Leave a compile by AOTAutograd: another rank's code of the graph is in the cache now.

    ``share_trace`` then asks for the code again. Control cannot return there otherwise. AOTAutograd
    calls the partition function between its trace and Inductor, takes nothing but two graphs from
    it, and has no hook by which a compile ends early with code that exists (seen in 2.13).

    It is a BaseException, because nothing failed: torch counts each Exception that leaves
    AOTAutograd as a failed compile, and the session tries a compile again that failed.
    """


class SharedTrace:
    """One compile of a graph that other ranks may have too. ``made_by``: the rank that made its
    code; None if it is this one.
    """

    def __init__(
        self,
        job: Coordination,
        rank: int,
        about: object,
        is_alike: Callable[[fx.GraphModule], bool],
        program: UntracedProgram,
    ) -> None:
        self._job, self._rank, self._about, self._program = job, rank, about, program
        self._is_alike = is_alike
        self._entries = caches.TracedEntries()
        self._asked = self._looked = False
        self._ahead: _Ahead | None = None  # of a graph that is being traced
        self._claims: list[Claim] = []
        self._graphs: dict[str, None] = {}
        self.is_rank_free = True  # what was made of it so far
        self.made_by: int | None = None

    def missed(self, entries: caches.TracedEntries) -> bool:
        """AOTAutograd's cache has nothing. Returns whether it may have it now, of a rank that
        has traced ahead of the others.
        """
        is_first, self._looked = not self._looked, True
        self._entries = entries
        if not (is_first and self._program.is_known()):
            return False
        try:
            if not (key := entries.key_of_all_ranks()):
                return False
            facts = (self._about, local_graphs.is_rank_dependent())
            mark = shared_compile.leave_mark()
            digest = self._program.digest(key, *facts)
            mine = self._claimed(f"untraced/{digest}", mark, self._program.meshes)
            if mine is not None:
                self._ahead = _Ahead(mine)
        except CoordinationError as error:
            log.warning("The job's store failed: this rank compiles by itself (%s).", error)
        return self.made_by is not None

    def traced(self, gm: fx.GraphModule, is_alike: Callable[[fx.GraphModule], bool]) -> None:
        """AOTAutograd has traced a graph, joint or of a forward alone: whether it is that of the
        ranks that wait is known now.
        """
        if self._ahead is None:
            return
        ahead, self._ahead = self._ahead, None
        read = ahead.end()
        if not read and is_alike(gm) and not draws_numbers(gm):
            self._claims.append(ahead.claim)
            return
        log.info(
            "Each rank traces this graph: %s.", f"it reads {read}" if read else "it may differ"
        )
        ahead.claim.end("", None)

    def ask(self, joint: fx.GraphModule, how: Mapping[str, Any]) -> None:
        """Let one rank go on with a joint graph. Raises CompiledElsewhere where another has."""
        is_first, self._asked = not self._asked, True
        is_whole = "static_lifetime_input_indices" in how
        self.traced(joint, lambda gm: is_first and is_whole and self._is_alike(gm))
        # Without the key AOTAutograd keeps no entry; a graph inside another is partitioned without
        # the indices.
        if not (is_first and self._entries.key and is_whole):
            return
        if not self._is_alike(joint):
            return
        unlike = (local_graphs.is_rank_dependent(), local_graphs.has_uneven_inputs())
        facts = (self._about, dict(how), dynamo.metadata_in_work(), unlike, inductor.digests())
        try:
            traced = TracedProgram(joint, *facts)
        except NoDigestError as error:
            log.info(
                "This rank compiles for itself: nothing tells its graph from others (%s).", error
            )
            return
        try:
            mark = shared_compile.leave_mark()
            mine = self._claimed(f"traced/{traced.digest}", mark, lambda: traced.meshes)
            if mine is not None:
                self._claims.append(mine)
        except CoordinationError as error:
            log.warning("The job's store failed: this rank compiles by itself (%s).", error)
        if self.made_by is not None:
            raise CompiledElsewhere

    def _claimed(
        self, key: str, mark: str, meshes: Callable[[], Mapping[str, DeviceMesh]]
    ) -> Claim | None:
        """Return this rank's claim on a key; None if another made the code, which ``made_by``
        says, or had none.
        """
        found = claim(self._job, key, self._rank, mark)
        if isinstance(found, Claim):
            return found
        if found.rank == self._rank:  # compiled here before, and gone from the cache
            return None
        # Who waits for this rank is to wait for that one: it answers for its own launches alone.
        while self._claims:
            self._claims.pop().end("", None)
        return self._wait(found, mark, meshes())

    def _wait(self, turn: Turn, mark: str, meshes: Mapping[str, DeviceMesh]) -> Claim | None:
        """Wait for another rank's code; or return the claim that this rank takes over."""
        log.info("Rank %d compiles this program: waiting for it.", turn.rank)
        waiting = shared_compile.wait_for(self._job, turn, self._rank, mark, self.offers)
        outcome = waiting.outcome()
        if isinstance(outcome, Claim):
            return outcome
        content = waiting.entry() if outcome.digest else None
        if content is None or hashlib.sha256(content).hexdigest() != outcome.digest:
            log.info("Rank %d has nothing for this one: compiling.", waiting.turn.rank)
            return None
        try:
            entry, graphs = _unpacked(content)
            caches.put_own_entry(self._entries.key, entry, meshes)
            placed = all(caches.put_entry(key, each) for key, each in graphs.items())
        except (
            Exception
        ) as error:  # of bytes that are another torch's, a mesh that is not here, a disk
            log.info(
                "What rank %d made does not fit here: compiling (%r).", waiting.turn.rank, error
            )
            return None
        if placed:
            self.made_by = waiting.turn.rank
        return None

    def offers(self, trace: CollectiveTrace, offer: Offer) -> Offer:
        """``offer``, also for ranks that wait."""
        for each in self._claims:
            offer = each.offers(shared_compile.alike(trace), offer)
        return offer

    def compiled(self, key: str, is_rank_free: bool) -> None:
        """Note a graph of Inductor's that was made on the way, by its key in the cache."""
        self.is_rank_free = self.is_rank_free and is_rank_free
        if key:
            self._graphs[key] = None

    def end(self) -> None:
        """Say what came of this rank's turns, if it had one."""
        if self._ahead is not None:  # it failed while it traced, or made no code
            ahead, self._ahead = self._ahead, None
            ahead.end()
            ahead.claim.end("", None)
        if not self._claims:
            return
        entry = self._entries.made() if self.is_rank_free else None
        content = None
        if entry is not None:
            wanted = self._graphs if any(each.is_wanted() for each in self._claims) else {}
            graphs = {key: caches.newest_entry(key) for key in wanted}
            content = _packed(entry, {key: each for key, each in graphs.items() if each})
        for each in self._claims:
            if content is None or len(content) > MOST_BYTES:
                each.end("", None)
            else:
                each.end(hashlib.sha256(content).hexdigest(), content)


class _Ahead:
    """A rank that traces while others wait to hear whether it reads its rank."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self._noticing = contextlib.ExitStack()
        self._reads = self._noticing.enter_context(rank_reads.noticed())

    def end(self) -> str:
        """It has traced; return what it has read of its rank."""
        self._noticing.close()
        return self._reads.first


def share_trace(
    session: CompileSession,
    program: UntracedProgram,
    is_alike: Callable[[fx.GraphModule], bool],
    make: Callable[[], T],
) -> tuple[T, int | None]:
    """Return what ``make`` compiles of ``program``, or finds in the cache once another rank has
    made it; and that rank, if it was so.

    ``is_alike``: whether a joint graph makes equal code on all ranks that have it.
    """
    job = shared_compile.job_to_share(session)
    if job is None or any(each.binds_groups() for each in registry.extensions()):
        return make(), None
    about = session.options.digest()
    session.shared_trace = shared = SharedTrace(job, c10d.global_rank(), about, is_alike, program)
    with caches.traced_entries(shared.missed):
        try:
            with aot.before_partition(shared.ask):
                return make(), shared.made_by
        except CompiledElsewhere:
            log.info("Rank %s has made the code of this program.", shared.made_by)
        finally:
            session.shared_trace = None
            shared.end()
    return make(), shared.made_by


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
