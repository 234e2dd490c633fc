"""Run the passes on a graph, ours and third parties', in order, checked and timed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import fx

from inductor_passes import registry
from inductor_passes.cost import CostModel, TopologyCostModel, default_topology, load_topology
from inductor_passes.errors import (
    InvariantError,
    PassesError,
    PassFailedError,
    PreconditionError,
)
from inductor_passes.garbage_collector import without_cycle_collection
from inductor_passes.graph.collectives import expect_even_exchanges, input_tensors, is_launch
from inductor_passes.graph.dependencies import differs_by_numbers, launches_show_that_ranks_differ
from inductor_passes.graph.invariants import Communication, check_communication
from inductor_passes.graph.printing import user_line
from inductor_passes.graph_pass import GraphPass, Numerics, PassContext, PassStats, ScheduleOptions
from inductor_passes.pass_options import PassOptions
from inductor_passes.ranks.collective_trace import LaunchPlan
from inductor_passes.records import GraphRecord, PassRecord
from inductor_passes.report.describe import describe
from inductor_passes.report.logs import PassLog
from inductor_passes.schedule.schedule_pass import FollowPlan
from inductor_passes.simulate import simulate

log = logging.getLogger(__name__)


@without_cycle_collection()
def run_passes(
    graph: fx.Graph,
    options: PassOptions | None = None,
    *,
    phase: str = "inference",
    graph_id: str = "",
    ranks_differ: bool = False,
    ragged: bool = False,
    follow: LaunchPlan | None = None,
    cost: CostModel | None = None,
) -> GraphRecord | None:
    """Run the passes on a post-grad graph, in place, and predict the timeline before and after.

    Does not pin the order for lowering; the compile does. ``ranks_differ``: other ranks may hold
    another graph: the launches stay as they are, in their order. ``ragged``: they hold other sizes,
    so that only what ranks see in one another's plans may change launches. ``follow``: launch as
    this plan says. ``cost``: by default the model of the topology that the options name. Returns
    None, and changes nothing, for a graph without a collective on which no pass wants to run.
    Raises what a failing pass raises, and CannotFollowError for a plan that does not fit.
    """
    options = options or PassOptions()
    has_launch = any(is_launch(node) for node in graph.nodes)
    cost = cost or cost_model(graph, options)
    passes = [
        p
        for p in selected_passes(
            pass_context(cost, options, ranks_differ or follow is not None), options
        )
        if (has_launch or not p.needs_collectives) and not p.decides_what_is_kept
    ]
    if follow is not None:
        passes = _following(passes, FollowPlan(cost, follow))
    if not has_launch and not passes:
        return None
    unlike = ranks_differ or launches_show_that_ranks_differ(graph)
    # Sizes that tokens give are the same graph on all ranks: where to cut it shows no rank's
    # numbers.
    alike = not (ranks_differ or ragged) and not differs_by_numbers(graph)
    expect_even_exchanges(graph)
    before = simulate(graph, cost)
    records: list[PassRecord] = []
    pass_log = PassLog(graph, graph_id)
    for pass_ in passes:
        cuts = alike and pass_.allows_uneven_counts
        kept = (unlike and follow is None) or (ragged and not pass_.shows_in_plan)
        if pass_.changes_launches and kept and not cuts:
            reason = "launches stay the program's, which all ranks share"
            records.append(_record(pass_, "skipped", PassStats(False), time.perf_counter(), reason))
        else:
            records.append(run_pass(pass_, graph))
        pass_log.after(records[-1])
    changed = any(record.changed for record in records)
    after = simulate(graph, cost) if changed else before
    return describe(
        graph, cost, before=before, after=after, passes=records, phase=phase, graph_id=graph_id
    )


def _following(passes: list[GraphPass], follow: FollowPlan) -> list[GraphPass]:
    """Put the plan before the passes that order the graph; leave out those whose work it holds."""
    kept = [p for p in passes if not p.replaced_by_plan]
    ordering = (i for i, p in enumerate(kept) if p.schedules or p.reads_schedule)
    at = next(ordering, len(kept))
    # Of all passes, also those that this rank has off: the plan is the job's.
    followers = [p.following(follow.plan) for p in registry.ordered_passes()]
    return [*kept[:at], *(p for p in followers if p is not None), follow, *kept[at:]]


def pass_context(cost: CostModel, options: PassOptions, ranks_differ: bool) -> PassContext:
    """Return the context that the passes of one compile are built from."""
    schedule = options.schedule
    return PassContext(
        cost,
        schedule if isinstance(schedule, ScheduleOptions) else ScheduleOptions(),
        options.exact,
        ranks_differ,
        options.extra,
    )


def selected_passes(context: PassContext, options: PassOptions) -> list[GraphPass]:
    """The passes that these options run, in order."""
    allowed = []
    for pass_ in registry.build_passes(context, options.passes, options.disable):
        named = options.passes is not None and pass_.name in options.passes
        if not pass_.enabled(options):
            continue
        if options.exact and pass_.numerics is not Numerics.BITWISE:
            continue
        if pass_.numerics is Numerics.APPROXIMATE and not named:
            continue
        allowed.append(pass_)
    return allowed


def cost_model(graph: fx.Graph, options: PassOptions) -> TopologyCostModel:
    """The model of the topology asked for, or of the default for the device that communicates."""
    return TopologyCostModel(load_topology(topology_name(graph, options)))


def topology_name(graph: fx.Graph, options: PassOptions) -> str:
    """Name of the topology asked for, or of the default for the device that communicates."""
    if options.topology is not None:
        return options.topology
    devices = (t.device.type for n in graph.nodes if is_launch(n) for t in input_tensors(n))
    return default_topology(next(devices, "cpu"))


@without_cycle_collection()
def run_pass(pass_: GraphPass, graph: fx.Graph) -> PassRecord:
    """Check, run and check again."""
    start = time.perf_counter()
    try:
        stats = _checked_run(pass_, graph)
    except PreconditionError as error:
        log.info("%s skipped: %s", pass_.name, error)
        return _record(pass_, "skipped", PassStats(False), start, str(error))
    record = _record(pass_, "ran", stats, start)
    log.debug("%s: %s in %.1f ms", pass_.name, dict(stats.counters), 1e3 * record.seconds)
    return record


def _checked_run(pass_: GraphPass, graph: fx.Graph) -> PassStats:
    nodes = list(graph.nodes)
    communication = Communication.of(graph)
    expect_even_exchanges(graph)
    try:
        pass_.requires(graph)
        stats = pass_.run(graph)
    except PassesError:
        raise
    except Exception as error:
        raise PassFailedError(
            f"The pass {pass_.name} raised {type(error).__name__}: {error}.",
            f"It was working on a graph of {len(nodes)} nodes{_from_line(nodes)}.",
            f"Report it to the author of the pass, or leave it out with options={{'disable': "
            f"['{pass_.name}']}}.",
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
        schedule=stats.schedule,
        notes=stats.notes,
        split=stats.split,
    )
