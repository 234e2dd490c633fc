"""The one graph pass that Inductor sees: ours and third parties', in order, checked and timed."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from inductor_passes import _torch, pin, recorder, registry, reporters
from inductor_passes.base import GraphPass, Numerics, PassContext, PassStats
from inductor_passes.checks import check_groups
from inductor_passes.collectives import input_tensors, is_launch
from inductor_passes.cost import TopologyCostModel, default_topology, load_topology
from inductor_passes.describe import describe
from inductor_passes.errors import (
    InvariantError,
    PassesError,
    PassFailedError,
    PreconditionError,
)
from inductor_passes.invariants import Communication, check_communication
from inductor_passes.pass_options import PassOptions
from inductor_passes.records import GraphRecord, PassRecord
from inductor_passes.simulate import simulate
from inductor_passes.source_lines import user_line

log = logging.getLogger(__name__)


def run_passes(
    graph: fx.Graph,
    options: PassOptions | None = None,
    *,
    phase: str = "inference",
    graph_id: str = "",
) -> GraphRecord | None:
    """Run the passes on a post-grad graph, in place, and predict the timeline before and after.

    Does not pin the order for lowering; the compile does. Returns None, and changes nothing, for a
    graph without a collective on which no pass wants to run. Raises what a failing pass raises,
    under ``on_pass_error="raise"``.
    """
    options = options or PassOptions()
    has_launch = any(is_launch(node) for node in graph.nodes)
    cost = cost_model(graph, options)
    passes = [
        p
        for p in selected_passes(PassContext(cost), options)
        if has_launch or not p.needs_collectives
    ]
    if not has_launch and not passes:
        return None
    before = simulate(graph, cost)
    records = [run_pass(p, graph, on_error=options.on_pass_error) for p in passes]
    changed = any(record.changed for record in records)
    after = simulate(graph, cost) if changed else before
    return describe(
        graph,
        cost,
        before=before,
        after=after,
        passes=records,
        phase=phase,
        graph_id=graph_id,
    )


def selected_passes(context: PassContext, options: PassOptions) -> list[GraphPass]:
    """The passes that these options run, in order."""
    allowed = []
    for pass_ in registry.build_passes(context, options.passes, options.disable):
        named = options.passes is not None and pass_.name in options.passes
        if pass_.schedules and options.schedule == "off":
            continue
        if options.exact and pass_.numerics is not Numerics.BITWISE:
            continue
        if pass_.numerics is Numerics.APPROXIMATE and not named:
            continue
        allowed.append(pass_)
    return allowed


def cost_model(graph: fx.Graph, options: PassOptions) -> TopologyCostModel:
    """The model of the topology asked for, or of the default for the device that communicates."""
    name = options.topology
    if name is None:
        devices = (t.device.type for n in graph.nodes if is_launch(n) for t in input_tensors(n))
        name = default_topology(next(devices, "cpu"))
    return TopologyCostModel(load_topology(name))


def run_pass(pass_: GraphPass, graph: fx.Graph, *, on_error: str = "raise") -> PassRecord:
    """Check, run and check again; under ``on_error="skip"`` a failure leaves the graph as it was.

    A pass is pure, so with "skip" it is tried on a copy first.
    """
    start = time.perf_counter()
    try:
        if on_error == "skip":
            trial = fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
            _checked_run(pass_, trial.graph)
        stats = _checked_run(pass_, graph)
    except PreconditionError as error:
        log.info("%s skipped: %s", pass_.name, error)
        return _record(pass_, "skipped", PassStats(False), start, str(error))
    except PassesError as error:
        if on_error != "skip":
            raise
        log.warning("The compile goes on without the pass %s: %s", pass_.name, error)
        return _record(pass_, "failed", PassStats(False), start, str(error))
    record = _record(pass_, "ran", stats, start)
    log.debug("%s: %s in %.1f ms", pass_.name, dict(stats.counters), 1e3 * record.seconds)
    return record


def _checked_run(pass_: GraphPass, graph: fx.Graph) -> PassStats:
    nodes = list(graph.nodes)
    communication = Communication.of(graph)
    try:
        pass_.requires(graph)
        stats = pass_.run(graph)
    except PassesError:
        raise
    except Exception as error:
        raise PassFailedError(
            f"The pass {pass_.name} raised {type(error).__name__}: {error}.",
            f"It was working on a graph of {len(nodes)} nodes{_from_line(nodes)}.",
            f"Report it to the author of the pass, leave it out with options={{'disable': "
            f"['{pass_.name}']}}, or compile on without it under "
            "options={'on_pass_error': 'skip'}.",
        ) from error
    if not isinstance(stats, PassStats):
        raise PassFailedError(
            f"The pass {pass_.name} returned {type(stats).__name__}.",
            "run() must return a PassStats.",
            "Return inductor_passes.PassStats(changed=..., counters={...}).",
        )
    check_communication(
        communication, graph, pass_.name, keeps_launch_order=pass_.keeps_launch_order
    )
    try:
        pass_.ensures(nodes, graph)
    except PassesError:
        raise
    except Exception as error:
        raise InvariantError(
            f"The pass {pass_.name} could not check its own promises: "
            f"{type(error).__name__}: {error}."
        ) from error
    return stats


def _from_line(nodes: Sequence[fx.Node]) -> str:
    lines = (user_line(node) for node in nodes if is_launch(node))
    first = next((line for line in lines if line), "")
    return f", the first collective of which is from {first}" if first else ""


def _record(
    pass_: GraphPass, status: str, stats: PassStats, start: float, reason: str = ""
) -> PassRecord:
    return PassRecord(
        name=pass_.name,
        numerics=pass_.numerics.value,
        status=status,
        changed=stats.changed,
        counters=dict(stats.counters),
        seconds=time.perf_counter() - start,
        reason=reason,
    )


# --- What Inductor calls ------------------------------------------------------------------------


@dataclass(frozen=True)
class Attachment:
    """The two passes of one compile, as Inductor configuration: before and after stock's post-grad."""

    options: PassOptions
    chain_pre: Any = None
    chain_post: Any = None
    # Stock's reorder_for_locality, which we run in its stead: whether at all, and in training too.
    locality: bool = True
    locality_in_training: bool = False

    def before(self, graph: fx.Graph, is_inference: bool) -> None:
        """Stock's ``reorder_for_locality``, except on graphs whose launches it would bring to their waits."""
        wanted = self.locality and (is_inference or self.locality_in_training)
        if wanted and not any(is_launch(node) for node in graph.nodes):
            _torch.reorder_for_locality(graph)
        if self.chain_pre is not None:
            _torch.call_pass(self.chain_pre, graph, is_inference)

    def after(self, graph: fx.Graph, is_inference: bool) -> None:
        """Run the passes, pin what they decided, and record it."""
        if self.chain_post is not None:
            _torch.call_pass(self.chain_post, graph, is_inference)
        check_groups(graph)
        name = _torch.graph_being_compiled()
        phase = "inference" if is_inference else "backward" if "backward" in name else "forward"
        record = run_passes(
            graph, self.options, phase=phase, graph_id=f"{_torch.compile_id()}:{phase}"
        )
        if record is None:
            return
        if self.options.schedule != "off" and pin.NAME not in self.options.disable:
            if _torch.can_pin_order():
                pin.pin_order(graph, cost_model(graph, self.options))
            else:
                log.warning(
                    "This torch has no control_dependencies: Inductor may move launches back."
                )
        recorder.compiled(record)
        if not recorder.is_followed():  # else whoever follows has more to add first
            reporters.write(self.options.report)
        log.info(
            "%s graph %s: %d collectives, exposed %.0f -> %.0f us, simulated on %s",
            record.phase,
            record.graph_id,
            len(record.collectives),
            record.before.exposed_us,
            record.after.exposed_us,
            record.topology,
        )
        _torch.trace_artifact(f"inductor_passes_{phase}_graph", lambda: str(graph))

    def uuid(self, side: str) -> str | None:
        """What Inductor's caches take for these passes; None, if a chained pass has none."""
        parts = [side, _torch.torch_version(), self.options.digest(), source_digest()]
        parts.append(f"{self.locality} {self.locality_in_training}")
        topologies = (
            (default_topology("cpu"), default_topology("cuda"))
            if self.options.topology is None
            else (self.options.topology,)
        )
        # A digest holds the shapes of all groups too: another mesh is another schedule.
        parts += [TopologyCostModel(load_topology(name)).digest() for name in topologies]
        for pass_ in registry.ordered_passes():
            parts.append(third_party_digest(pass_))
        for chained in (self.chain_pre, self.chain_post):
            if chained is not None:
                theirs = getattr(chained, "uuid", lambda: None)()
                if theirs is None:
                    return None
                parts.append(repr(theirs))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """A hash over every file of this package: a pass's helpers count as much as the pass."""
    hasher = hashlib.sha256()
    root = _torch.package_dir()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name.endswith((".py", ".json")):
                path = os.path.join(folder, name)
                hasher.update(os.path.relpath(path, root).encode())
                with open(path, "rb") as file:
                    hasher.update(file.read())
    return hasher.hexdigest()


def third_party_digest(pass_: registry.Registered) -> str:
    """Name, source file and configuration of a registered pass; defaults are in ``source_digest``."""
    cls = pass_ if isinstance(pass_, type) else type(pass_)
    if cls in registry.DEFAULT_PASSES:
        return pass_.name
    try:
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        source = ""
    config = pass_.digest() if isinstance(pass_, GraphPass) else ""
    return f"{pass_.name} {config} {hashlib.sha256(source.encode()).hexdigest()}"


@functools.cache
def _pass_classes() -> tuple[type, type]:
    base = _torch.pass_base()

    class Side(base):  # type: ignore[misc, valid-type]
        """One side of an attachment as the object that Inductor wants."""

        side = ""

        def __init__(self, attachment: Attachment) -> None:
            self.attachment = attachment

        def uuid(self) -> str | None:
            return self.attachment.uuid(self.side)

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other) and self.attachment == other.attachment

        def __hash__(self) -> int:
            return hash((self.side, self.attachment.options))

    class Before(Side):
        side = "before"

        def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
            self.attachment.before(graph, _is_inference(is_inference))

    class After(Side):
        side = "after"

        def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
            self.attachment.after(graph, _is_inference(is_inference))

    return Before, After


def _is_inference(told: bool | None) -> bool:
    """What Inductor says; torch 2.11 does not say it to passes, but to the graph's name."""
    return "inference" in _torch.graph_being_compiled() if told is None else told


def attach(attachment: Attachment) -> tuple[Any, Any]:
    """The objects for ``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass``."""
    before, after = _pass_classes()
    return before(attachment), after(attachment)
