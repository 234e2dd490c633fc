"""Compile one Dynamo graph through stock Inductor with our passes attached."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from inductor_passes.agree import carried, orders
from inductor_passes.agree.equal_launches import equal_launches_stay
from inductor_passes.agree.graph import place_of
from inductor_passes.agree.offer import CachedOffer
from inductor_passes.attach import shared_trace
from inductor_passes.attach.alike import is_rank_free, name_groups_alike
from inductor_passes.attach.generated_code import order_kept
from inductor_passes.attach.options import config_patches
from inductor_passes.attach.shared import shared_compile
from inductor_passes.attach.uneven import has_uneven_values
from inductor_passes.attach.untraced import UntracedProgram
from inductor_passes.collector import rare_cycle_collection
from inductor_passes.errors import RanksDifferError
from inductor_passes.kernels import availability
from inductor_passes.pass_options import PassOptions, split
from inductor_passes.records import GraphRecord
from inductor_passes.reporting import graph_ids, recorder, reporters
from inductor_passes.torch_compat import aot, c10d, caches, dynamo
from inductor_passes.torch_compat import inductor as inductor_compat

log = logging.getLogger(__name__)
T = TypeVar("T")
_makes_code: contextvars.ContextVar[bool] = contextvars.ContextVar("makes_code", default=True)


@contextlib.contextmanager
def graph_passes_only() -> Iterator[None]:
    """Compiles in the block stop after the graph passes: what they return runs the graph, uncompiled."""
    token = _makes_code.set(False)
    try:
        with caches.no_compile_caches():
            yield
    finally:
        _makes_code.reset(token)


def compile_with_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph as a torch.compile backend does.

    ``mode`` means what it means for ``backend="inductor"``; ``options`` are ours
    (``PassOptions``) and any of Inductor's. Raises OptionError for one that neither knows.
    """
    own, inductor = split(options or {}, mode)
    return compile_split(gm, example_inputs, own, inductor)


def compile_split(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    own: PassOptions,
    inductor: Mapping[str, Any],
    *,
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    region: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph by ``compile_fx`` with configuration of this compile alone: our options and Inductor's.

    ``region``: the compile's name in torch's logs. Inductor's and AOTAutograd's caches work as they do in stock. Code is made, and loaded from caches,
    inside ``around()``: that of a backward graph perhaps long after this returns.
    """
    current = graph_ids.compile_id()

    def rename(record: GraphRecord) -> str:
        return f"{current}:{record.phase}"

    def finish(cache: str, is_new: bool = False) -> None:
        if recorder.publish_cached(rename, cache) or is_new:
            reporters.write(own.report)

    compile_inner = (
        inductor_compat.compile_fx_inner if _makes_code.get() else inductor_compat.run_graph_passes
    )
    job = orders.current()
    settles = job is not None and bool(c10d.real_groups())
    failed: list[str] = []  # what backward graphs failed with

    def inner_compile(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        code, cache = None, "Inductor's cache"
        shared_trace.traced(gm, lambda gm: is_rank_free(gm, patches))
        name_groups_alike(gm)

        def make() -> Any:
            nonlocal cache
            with shared_compile(own.compile == "shared", args[0] if args else ()) as sharing:
                made = compile_inner(gm, *args, **kwargs)
            if sharing is not None and sharing.made_by is not None:
                cache = f"the compile of rank {sharing.made_by}"
            shared_trace.compiled("" if sharing is None else sharing.key, rank_free)
            return made

        def complete(record: GraphRecord) -> GraphRecord:
            kept = order_kept(record.order, dynamo.source_of(code))
            return dataclasses.replace(record, order_kept=kept)

        rank_free = is_rank_free(gm, patches)
        try:
            with (
                rare_cycle_collection(),  # a backward graph is compiled long after its frame
                graph_ids.given(current),
                recorder.completing(complete) as fresh,
                around(),
                caches.keyed_by_rank(not rank_free),
                _as_they_are(),
            ):
                code = as_settled(make)
        except Exception as error:
            if kwargs.get("is_backward"):
                failed.append(str(error))
            raise
        finish(cache, bool(fresh))
        return code

    if _holds_script_objects(gm):  # the harness pickles its arguments, which these refuse
        inductor = {"benchmark_harness": False, **inductor}
    place = place_of(gm.graph) if settles else ""
    patches = config_patches(own, inductor, uneven=has_uneven_values(gm), place=place)
    cache = "AOTAutograd's cache"
    apart = equal_launches_stay() if settles else contextlib.nullcontext()

    def compile_() -> Callable[..., Any]:
        def make() -> Callable[..., Any]:
            return inductor_compat.compile_fx(gm, example_inputs, inner_compile, patches, region)

        def is_alike(joint: fx.GraphModule) -> bool:
            return is_rank_free(joint, patches)

        def make_once() -> Callable[..., Any]:
            nonlocal cache
            wanted = own.compile == "shared"
            program = UntracedProgram(gm, example_inputs)
            made, rank = shared_trace.made_once(wanted, program, own.digest(), is_alike, make)
            if rank is not None:
                cache = f"the compile of rank {rank}"
            return made

        return as_settled(make_once)

    with around(), caches.keyed_by_rank(), apart:
        # Stock compiles a backward graph with its forward one for symbolic sizes alone, and ranks differ in these. Who
        # waits for peers to settle it would wait for those that get to theirs behind launches of the forward one.
        if settles and not dynamo.compiles_autograd():
            try:
                with aot.backward_at_once():
                    compiled = compile_()
            except Exception as error:
                if not failed or isinstance(error, RanksDifferError):
                    raise
                log.warning("The backward graph will not compile where it is needed: %s", failed[0])
                compiled = compile_()
        else:
            compiled = compile_()
    if job is not None and settles:
        dynamo.guard_frame(job.still_holds())
    finish(cache)
    return compiled if availability.why_not_here() else _watched(compiled)


@contextlib.contextmanager
def _as_they_are() -> Iterator[None]:
    """Errors of ranks that differ leave the block as themselves, not as what Inductor makes of them."""
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


def as_settled(make: Callable[[], T]) -> T:
    """Return what ``make`` compiles or loads, in the order of launches that all ranks have settled.

    Code from a cache was made by what ranks had settled then; where that is something else now, it is made anew.
    """
    job = orders.current()
    before = carried.Counts()
    made = make()
    if job is None:
        return made
    others = []
    for found in before.since():
        # Who waits for the code of the program that this is of hears of code from a cache too.
        offer = shared_trace.offers_of_all(found.stream, CachedOffer(found.plan))
        if (plan := job.decide(found.stream, offer).plan) != found.plan:
            others.append(plan)
    if others:
        dynamo.compile_again()
        with orders.compiled_apart(others):
            made = make()
    return made


def _watched(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Raise before a call what a fused kernel of an earlier one has reported: replaying a CUDA graph runs no operator."""
    from inductor_passes.kernels.workspace import raise_if_failed

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        raise_if_failed(wait=False)
        return compiled(*args, **kwargs)

    return call


def _holds_script_objects(gm: fx.GraphModule) -> bool:
    return any(isinstance(n.meta.get("example_value"), torch.ScriptObject) for n in gm.graph.nodes)
