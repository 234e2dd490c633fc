"""One compile of a Dynamo graph: what is asked for, and how it goes through upstream Inductor with
our passes.

``CompileSession.run`` reads top to bottom. Torch calls back on the way::

    run                              a backend's call, with the graph of one frame
      share_trace                    one rank may compile for all that have this program
        compile_fx                   AOTAutograd traces, or loads from its cache
          Attachment.joint           cuts the joint graph, as ranks agree
          lower                      for each half
            share_lowering           one rank may lower for all that have this graph
              Attachment.after       passes, in the order of launches that ranks agree on
              compile_fx_inner       Inductor makes code, or loads from its cache
      agreed                         code from a cache launches as ranks agree now, or is made anew
      publish                        records of what was done
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from inductor_passes import registry
from inductor_passes.errors import RanksDifferError
from inductor_passes.extension import in_work
from inductor_passes.garbage_collector import rare_cycle_collection
from inductor_passes.graph.phases import last_phase, mark_phases, phase_of
from inductor_passes.inductor.cache_keys import is_rank_free, name_groups_alike
from inductor_passes.inductor.generated_code import order_kept
from inductor_passes.inductor.hooks import mark_kept
from inductor_passes.inductor.local_graphs import (
    has_uneven_inputs,
    has_uneven_values,
    is_rank_dependent,
)
from inductor_passes.inductor.options import config_patches
from inductor_passes.inductor.shared_compile import SharedLowering, share_lowering
from inductor_passes.inductor.shared_trace import SharedTrace, UntracedProgram, share_trace
from inductor_passes.pass_options import PassOptions, split
from inductor_passes.ranks import carried, decision
from inductor_passes.ranks.carried import SharedChoice
from inductor_passes.ranks.collective_trace import CollectiveTrace, place_of
from inductor_passes.ranks.decision import Offer, Orders
from inductor_passes.ranks.protocol import CachedOffer
from inductor_passes.records import GraphRecord, PassRecord
from inductor_passes.report import recorder, report
from inductor_passes.rewrite.rematerialize import rematerialize
from inductor_passes.rewrite.share_collectives import equal_launches_stay
from inductor_passes.torch_compat import aot, c10d, caches, dynamo
from inductor_passes.torch_compat import inductor as inductor_compat

log = logging.getLogger(__name__)
T = TypeVar("T")
Code = Callable[..., Any]


@contextlib.contextmanager
def graph_passes_only() -> Iterator[None]:
    """Compiles in the block stop after the graph passes, for tests: what they return runs the
    graph, uncompiled.
    """
    before = CompileSession.lower_by
    CompileSession.lower_by = staticmethod(inductor_compat.run_graph_passes)
    try:
        with caches.no_compile_caches():
            yield
    finally:
        CompileSession.lower_by = staticmethod(before)


def compile_with_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Code:
    """Compile a graph as a torch.compile backend does.

    ``mode`` means what it means for ``backend="inductor"``; ``options`` are ours
    (``PassOptions``) and any of Inductor's. Raises OptionError for one that neither knows.
    """
    own, inductor = split(options or {}, mode)
    return CompileSession(gm, own, inductor).run(gm, example_inputs)


class CompileSession:
    """One compile of one Dynamo graph, by configuration of its own: our options and Inductor's.

    ``region``: the compile's name in torch's logs. ``traits``: what else code of this compile is
    made with, for those who change torch where it is made, or loaded from a cache. Inductor's and
    AOTAutograd's caches work as they do in upstream.

    It lives as long as the code, for a backward graph that is lowered late, and so holds neither
    graph nor inputs.
    """

    lower_by = staticmethod(inductor_compat.compile_fx_inner)

    def __init__(
        self,
        gm: fx.GraphModule,
        options: PassOptions,
        inductor: Mapping[str, Any],
        *,
        region: str | None = None,
        traits: frozenset[str] = frozenset(),
    ) -> None:
        for extension in registry.extensions():
            options = extension.resolved(options, gm)
        self.options, self.region, self.traits = options, region, traits
        self._lower_by = self.lower_by
        self.graph_id = recorder.compile_id()
        self.job = decision.current()
        # Ranks agree on launches where they can reach each other.
        self.agrees = self.job is not None and bool(c10d.real_groups())
        if _holds_script_objects(gm):  # the harness pickles its arguments, which these refuse
            inductor = {"benchmark_harness": False, **inductor}
        self.uneven = has_uneven_values(gm)
        self.patches = config_patches(
            options,
            inductor,
            uneven=self.uneven,
            place=place_of(gm.graph) if self.agrees else "",
            session=self,
        )
        self.cache_salt = ""  # of code that is made anew, under another order than cached code has
        self.shared_trace: SharedTrace | None = None  # the program, if other ranks may have it too
        self.lowering: SharedLowering | None = None  # the graph that is lowered, likewise
        self.made_by = "AOTAutograd's cache"  # or whoever made code that no pass ran for
        self.pending: recorder.Pending | None = None  # records of the graph that is lowered
        self._has_new = False  # whether any of them was completed
        self.kept: PassRecord | None = None  # of what forward keeps for backward, where a pass said
        self.choices: dict[str, SharedChoice] = {}  # of passes, which all ranks follow
        self._backward_failed = False

    def __deepcopy__(self, memo: object) -> CompileSession:
        """A copy of Inductor's configuration, in which the passes stand, is of the same compile."""
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """In another process there is no session."""
        return _nothing, ()

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Code:
        """Compile the graph. A backward graph is lowered here too where ranks agree, else when
        it is first needed.
        """
        with in_work(self), caches.keyed_by_rank(), self._equal_launches(), self._backward_too():
            compiled = self._traced(gm, inputs)
        if self.job is not None and self.agrees:
            dynamo.guard_frame(self.job.still_holds())
        self.publish()
        checks = [check for each in registry.extensions() if (check := each.before_call())]
        return _checked(compiled, checks) if checks else compiled

    def _equal_launches(self) -> contextlib.AbstractContextManager[None]:
        return equal_launches_stay() if self.agrees else contextlib.nullcontext()

    def _backward_too(self) -> contextlib.AbstractContextManager[None]:
        """Lower a backward graph together with its forward one, where ranks agree.

        Upstream does so for symbolic sizes alone, and ranks differ in these. A rank that waits for
        agreement on a backward graph would otherwise wait for peers that reach theirs only after
        launches of the forward one. One that fails may never be needed: it is lowered again then.
        """
        if self.agrees and not dynamo.compiles_autograd():
            return aot.backward_at_once(lambda: self._backward_failed)
        return contextlib.nullcontext()

    def _traced(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Code:
        """AOTAutograd's part, in the order of launches that ranks agree on."""
        return self.agreed(functools.partial(self._trace_or_load, gm, inputs))

    def _trace_or_load(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Code:
        """Trace and compile, or load what a rank has made that has the same program."""
        made, rank = share_trace(
            self,
            UntracedProgram(gm, inputs),
            self._is_rank_free,
            lambda: inductor_compat.compile_fx(gm, inputs, self.lower, self.patches, self.region),
        )
        if rank is not None:
            self.made_by = f"the compile of rank {rank}"
        return made

    def _is_rank_free(self, gm: fx.GraphModule) -> bool:
        return is_rank_free(gm, self.patches)

    def lower(self, gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        """Make code of a graph of AOTAutograd's: inference, forward or backward, the last
        perhaps long after ``run``.
        """
        if how.get("is_inference") and mark_phases(gm.graph):
            differ = self.uneven or has_uneven_inputs() or is_rank_dependent()
            self.kept = mark_kept(gm.graph, self.options, differ)
            rematerialize(gm)
        rank_free = self._is_rank_free(gm)
        if self.shared_trace is not None:
            self.shared_trace.traced(gm, self._is_rank_free)
        name_groups_alike(gm)
        self.made_by = "Inductor's cache"
        before, self.pending, self._has_new = self.pending, {}, False
        code: Any = None
        try:
            with (
                rare_cycle_collection(),  # a backward graph is lowered long after its frame
                in_work(self),
                caches.keyed_by_rank(not rank_free),
                _ranks_that_differ_say_so(),
            ):
                code = self.agreed(lambda: self._lower_or_load(gm, inputs, how, rank_free))
        except Exception as error:
            # Ranks that differ are an error at once: the forward graph would launch without them.
            self._backward_failed = bool(how.get("is_backward")) and not isinstance(
                error, RanksDifferError
            )
            raise
        finally:
            self._complete_records(code)
            self.pending = before
        self.publish(self._has_new)
        return code

    def _complete_records(self, code: Any) -> None:
        """Publish what was noted of a graph, with what its code says; None for one that failed."""
        if self.pending:
            source = dynamo.source_of(code)
            recorder.complete(self.pending, lambda record: order_kept(record.order, source))
            self._has_new = True
            self.pending.clear()

    def _lower_or_load(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        how: Mapping[str, Any],
        rank_free: bool,
    ) -> Any:
        """Run Inductor, or load what a rank has made that has the same graph."""
        apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if last_phase(gm.graph):  # what a backward reads would be computed in the forward
            apart = inductor_compat.fusing_within(phase_of)
        with share_lowering(self, inputs) as self.lowering, apart:
            made = self._lower_by(gm, inputs, **how)
            # Ranks that wait for the code look for its records with it.
            self._complete_records(made)
        shared, self.lowering = self.lowering, None
        if shared is not None and shared.made_by is not None:
            self.made_by = f"the compile of rank {shared.made_by}"
        if self.shared_trace is not None:
            self.shared_trace.compiled("" if shared is None else shared.key, rank_free)
        return made

    def agreed(self, make: Callable[[], T]) -> T:
        """Return what ``make`` compiles or loads, as all ranks agree now.

        Code from a cache was made by what ranks had agreed on then; where that is something else
        now, it is made anew.
        """
        given_salt = self.cache_salt
        try:
            for _ in range(2):  # choices may differ, and then launches
                before = carried.Counts()
                made = make()
                if self.job is None or not (others := self._agreed_otherwise(self.job, before)):
                    return made
                dynamo.compile_again()
                self.cache_salt = _digest([self.cache_salt, *others])
            return make()
        finally:
            self.cache_salt = given_salt

    def _agreed_otherwise(self, job: Orders, before: carried.Counts) -> list[str]:
        """Return what ranks have agreed on that code made or loaded since then does otherwise.

        Choices come first: what code launches that has made another choice is nobody's vote.
        """
        choices = [(choice, job.as_first_rank(choice)) for choice in before.choices_since()]
        if others := [text for choice, text in choices if text != choice.text]:
            return others
        for found in before.since():
            # Who waits for the code of the program that this is of hears of code from a cache too.
            offer = self.offer(found.trace, CachedOffer(found.plan))
            if (plan := job.decide(found.trace, offer).plan) != found.plan:
                others.append(plan)
        return others

    def offer(self, trace: CollectiveTrace, offer: Offer) -> Offer:
        """``offer`` of the graph in work, which ranks that wait for it, or for the program that
        it is of, give too.
        """
        for shared in (self.shared_trace, self.lowering):
            if shared is not None:
                offer = shared.offers(trace, offer)
        return offer

    def publish(self, is_new: bool = False) -> None:
        """Publish records of graphs that came from a cache; ``made_by`` names what made them."""

        def named(record: GraphRecord) -> str:
            return f"{self.graph_id}:{record.phase}"

        if recorder.publish_cached(named, self.made_by) or is_new:
            report.write(self.options.report)


def _nothing() -> None:
    return None


def _digest(plans: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(plans).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _ranks_that_differ_say_so() -> Iterator[None]:
    """Errors of ranks that differ leave the block as themselves, not as what Inductor makes of
    them.
    """
    try:
        yield
    except RanksDifferError:
        raise
    except Exception as error:
        inner: Any = error
        while inner is not None:
            if isinstance(inner, RanksDifferError):
                raise inner from None
            inner = getattr(inner, "inner_exception", None) or inner.__cause__
        raise


def _checked(compiled: Code, checks: Sequence[Callable[[], object]]) -> Code:
    """Run what extensions check before each call of compiled code."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            check()
        return compiled(*args, **kwargs)

    return call


def _holds_script_objects(gm: fx.GraphModule) -> bool:
    return any(isinstance(n.meta.get("example_value"), torch.ScriptObject) for n in gm.graph.nodes)
