"""Let a user say how much memory a training step may take: three passes.

One marks what the forward keeps for the backward, before the two are parted, and which states of
the optimizer wait on the host. The second one caps what the schedule of each graph may take, and
the third one moves the states.
"""

from __future__ import annotations

import json
import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.extension import carry
from inductor_passes.graph.aliasing import is_view
from inductor_passes.graph.collectives import (
    is_launch,
    is_wait,
    kind,
    launches,
    output_bytes,
    tensor_bytes,
)
from inductor_passes.graph.edit import TrialCopy
from inductor_passes.graph.phases import clear_phases, mark_joint
from inductor_passes.graph.printing import user_line
from inductor_passes.graph_pass import GraphPass, Numerics, PassContext, PassStats
from inductor_passes.memory.budget import OFFLOAD, OPTION, budget_bytes
from inductor_passes.memory.host_copies import AWAY, marked_away, move_states, move_to_host
from inductor_passes.memory.search import Choose, Retention, RetentionSearch
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass
from inductor_passes.ranks import decision
from inductor_passes.ranks.carried import SharedChoice
from inductor_passes.ranks.collective_trace import digest
from inductor_passes.rewrite import REWRITES
from inductor_passes.rewrite.rematerialize import (
    borders,
    decide_kept,
    may_repeat,
    recompute_marked,
)
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule.solver.lower_bound import lower_bound
from inductor_passes.simulate import simulate
from inductor_passes.torch_compat.aot import is_joint
from inductor_passes.torch_compat.nodes import function_name

log = logging.getLogger(__name__)

# Of a budget, for what the model does not see: buffers that kernels and allocators add.
RESERVE = 0.05
# Of a step, for copies to the host: where they spare less, what waits for them takes it.
LEAST_SPARED = 0.05
ROUNDS = 3  # in which less is kept because a schedule did not fit
MOST_LINES = 10  # of a list for people


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice as it is scheduled: the time of the step (us) and its peak (bytes)."""

    choice: Retention
    us: float
    peak_bytes: int


def agree_on_gathers(graph: fx.Graph, budget: float, chosen: list[int]) -> list[int]:
    """Return which launches of a graph run again on all ranks, by number: those that the first
    rank to ask for this budget has chosen. The code that is being made carries them.

    Ranks with batches of other lengths would choose otherwise.
    """
    job = decision.current()
    if job is None or not job.can_meet():
        return chosen
    about = f"gathered again/{digest([budget, *map(kind, launches(graph))])}"
    text = job.as_first_rank(SharedChoice(about, json.dumps(chosen)))
    carry(SharedChoice(about, text))
    return [int(each) for each in json.loads(text)]


def _may_be_faster(search: RetentionSearch, choice: Retention, best: Tried) -> bool:
    """Return whether a choice is worth a schedule, which takes seconds, beside the best so far."""
    if best.peak_bytes > search.limit_bytes:
        return choice.peak_bytes < best.peak_bytes
    if choice.peak_bytes > search.limit_bytes:
        return False
    again_us = search.again_us(choice)
    if choice.moved and not (best.choice.moved or best.choice.states):
        return search.again_us(best.choice) - again_us >= LEAST_SPARED * best.us
    return search.compute_us + again_us < best.us


def _rank(limit: int) -> Callable[[Tried], tuple[int, float]]:
    return lambda tried: (max(0, tried.peak_bytes - limit), tried.us)


def _carried_out(graph: fx.Graph, search: RetentionSearch, choice: Retention) -> fx.Graph:
    """A copy of a graph in which runs again what a choice says, and states are marked."""
    trial = TrialCopy(graph)
    twins = trial.twins()
    kept, again = search.marks(choice)
    decide_kept(trial.graph, [twins[node] for node in kept], [twins[node] for node in again])
    recompute_marked(trial.graph)
    for border in borders(trial.graph) if choice.moved else ():
        move_to_host(border, [twins[node] for node in search.moves(choice)])
    for state in search.states[: choice.states]:
        twins[state.node].meta[AWAY] = True
    return trial.graph


def _move(graph: fx.Graph, moved: Collection[fx.Node]) -> None:
    """Move values to the host, and back for what a backward makes of them again."""
    joint = is_joint(graph)
    if joint:
        mark_joint(graph)
    for value in moved:
        value.meta.pop("recompute", None)
    for border in borders(graph):
        border.recompute(set(border.forward) - border.derived_again(moved))
        move_to_host(border, moved)
    if joint:  # a graph that the partition makes of it has no phases
        clear_phases(graph)


class KeepWithinBudget(GraphPass):
    """Mark what a training step keeps from forward to backward, so that it fits a budget.

    What the program says stays: values in checkpoints are computed again, and gathered parameters
    that ``reshard_after_forward=False`` keeps are kept.

    Requires: a graph of forward and backward, in the order of the program.
    Ensures:  every value that a backward reads is marked; what it reads from the host's memory is
              copied there and back, and other nodes stay.
    Stats:    ``kept``, ``computed_again``, ``gathered_again``, ``moved_to_host`` (values).
    """

    name = "keep_within_budget"
    decides_what_is_kept = True
    needs_collectives = False

    def __init__(
        self,
        cost: CostModel,
        scheduler: ScheduleGraph,
        rewrites: Sequence[GraphPass],
        budget: float,
        *,
        may_move: bool = False,
        may_release: bool = False,
        ranks_differ: bool = False,
    ) -> None:
        self.cost = cost
        self.scheduler = scheduler
        self.rewrites = rewrites
        self.budget = budget
        self.may_move = may_move
        self.may_release = may_release
        self.ranks_differ = ranks_differ

    @classmethod
    def build(cls, context: PassContext) -> KeepWithinBudget:
        rewrites = [each.build(context) for each in REWRITES] if not context.ranks_differ else []
        return cls(
            context.cost,
            ScheduleGraph.build(context),
            [each for each in rewrites if not context.exact or each.numerics is Numerics.BITWISE],
            context.extra.get(OPTION, 0),
            may_move=bool(context.extra.get(OFFLOAD)),
            may_release=context.extra.get(OFFLOAD) is True,
            ranks_differ=context.ranks_differ,
        )

    @classmethod
    def enabled(cls, options: PassOptions) -> bool:
        return OPTION in options.extra

    def digest(self) -> str:
        moves = f"{self.may_move} {self.may_release}"
        return f"{self.budget} {moves} {self.scheduler.digest()} {self.ranks_differ}"

    def run(self, graph: fx.Graph) -> PassStats:
        # With the module's constants: upstream's partition asks for them.
        given = TrialCopy(graph, in_module=True)
        if is_joint(graph):
            mark_joint(given.graph)
        limit = value_limit(graph, self.budget)
        search = self._search(given.graph, limit, self._as_the_program(given.graph))
        if not search.borders:
            return PassStats(changed=False)
        best = self.fastest(given.graph, search)
        chosen = search.gathers_again(best.choice)
        if (agreed := agree_on_gathers(given.graph, self.budget, chosen)) != chosen:
            search = self._search(given.graph, limit, agreed)
            best = self.fastest(given.graph, search)
        kept, runs_again = search.marks(best.choice)
        moved = search.moves(best.choice)
        notes = [*self._summary(given.graph, search, best), *_lines("kept", kept)]
        states = search.states[: best.choice.states]
        notes += [*_lines("moved to the host", moved), *_lines("runs again", runs_again)]
        if states:
            size = _size(sum(each.bytes for each in states))
            notes.append(f"on the host up to the update: {len(states)} x optimizer state, {size}")
        if best.peak_bytes > limit:
            trial = _carried_out(given.graph, search, best.choice)
            move_states(trial, marked_away(trial), self.cost)
            missing = self._missing(trial, limit, best.peak_bytes)
            log.warning("%s", "\n  ".join(missing))
            notes = [*missing, *notes]
        original = {twin: node for node, twin in given.twins().items()}
        decide_kept(graph, [original[n] for n in kept], [original[n] for n in runs_again])
        if moved:
            _move(graph, [original[n] for n in moved])
        for state in states:
            original[state.node].meta[AWAY] = True
        gathers = sum(is_launch(node) for node in runs_again)
        again = {_maker(node) for node in runs_again}
        computed = sum(not (is_view(n) or is_launch(n) or is_wait(n)) for n in again)
        counters = {"kept": len(kept), "computed_again": computed, "gathered_again": gathers}
        counters["moved_to_host"] = len(moved)
        return PassStats(changed=True, counters=counters, notes=tuple(notes))

    def _search(self, graph: fx.Graph, limit: int, again: list[int] | None) -> RetentionSearch:
        return RetentionSearch(
            graph,
            self.cost,
            limit,
            again,
            may_move=self.may_move,
            may_release=self.may_release,
        )

    def _as_the_program(self, graph: fx.Graph) -> list[int] | None:
        """The gathers that the program has run again, where ranks may hold other graphs or cannot
        agree on others.
        """
        job = decision.current()
        if not self.ranks_differ and (job is None or job.can_meet()):
            return None
        return [i for i, launch in enumerate(launches(graph)) if may_repeat(launch)]

    def fastest(self, graph: fx.Graph, search: RetentionSearch) -> Tried:
        """Return the choice whose schedule is the shortest that fits; the leanest if none does.

        Buckets hold memory that no choice knows of: where the best one does not fit with them, less
        is kept.
        """
        limit = search.limit_bytes
        best, choose = self._shortest(graph, search)
        found = best
        for _ in range(ROUNDS):
            if found.peak_bytes <= limit:
                break
            search.limit_bytes -= found.peak_bytes - limit
            choice = choose()
            if choice == found.choice:
                break  # nothing less can be kept in this way
            found = self.scheduled(graph, search, choice, limit)
            best = min(best, found, key=_rank(limit))
        search.limit_bytes = limit
        return best

    def _shortest(self, graph: fx.Graph, search: RetentionSearch) -> tuple[Tried, Choose]:
        """Return the choice with the shortest schedule, and how it was found."""
        limit = search.limit_bytes
        seen: set[object] = set()
        best: tuple[Tried, Choose] | None = None
        for choose, choice in search.choices():
            kept = (*(cut.kept for cut in choice.cuts), choice.moved, choice.states)
            if kept in seen or (best and not _may_be_faster(search, choice, best[0])):
                continue
            seen.add(kept)
            found = self.scheduled(graph, search, choice, limit), choose
            best = min(best or found, found, key=lambda each: _rank(limit)(each[0]))
        assert best is not None
        return best

    def scheduled(
        self, graph: fx.Graph, search: RetentionSearch, choice: Retention, limit: int
    ) -> Tried:
        """Schedule a step that keeps what a choice says, behind the passes that rewrite it."""
        trial = self._rewritten(graph, search, choice)
        trial.output_node().meta[CAP_BYTES] = limit
        solution, _ = self.scheduler.forecast(trial, self.scheduler.extract(trial))
        return Tried(choice, solution.makespan_us, solution.peak_bytes)

    def _rewritten(self, graph: fx.Graph, search: RetentionSearch, choice: Retention) -> fx.Graph:
        trial = _carried_out(graph, search, choice)
        for each in self.rewrites:
            run_pass(each, trial)
        move_states(trial, marked_away(trial), self.cost)
        return trial

    def bound_us(self, graph: fx.Graph, search: RetentionSearch) -> float:
        """Return a time that no choice within the budget and no order of it can beat, in the
        model's prices.
        """
        least_us = search.least_us(simulate(graph, self.cost).compute_us)
        everything = search.keeping([crossing.nodes for crossing in search.crossings])
        trial = self._rewritten(graph, search, everything)
        return max(lower_bound(self.scheduler.extract(trial).problem).us, least_us)

    def _summary(self, graph: fx.Graph, search: RetentionSearch, best: Tried) -> list[str]:
        everything, bound = simulate(graph, self.cost), self.bound_us(graph, search)
        inputs = input_bytes(graph)
        saved = max(0.0, min(best.choice.byte_us * 2**30, best.us - bound))
        more = (
            f"a GiB more would save some {saved:.0f} us" if saved else "more memory saves nothing"
        )
        return [
            f"budget {_size((search.limit_bytes + inputs) / (1 - RESERVE))}, {RESERVE:.0%} of it "
            f"in reserve; inputs take {_size(inputs)}, all values at once "
            f"{_size(everything.peak_bytes)}",
            f"predicted peak {_size(best.peak_bytes + inputs)}, of which "
            f"{_size(best.choice.kept_bytes)} are kept from forward to backward",
            f"predicted step {best.us:.0f} us; no choice within the budget takes less than "
            f"{bound:.0f} us (gap {best.us / max(bound, 1e-9) - 1:.1%})",
            *([more] if best.peak_bytes <= search.limit_bytes else []),
        ]

    def _missing(self, trial: fx.Graph, limit: int, peak: int) -> list[str]:
        """What is needed, and what takes it."""
        live = simulate(trial, self.cost).live_bytes
        needed = (peak + input_bytes(trial)) / (1 - RESERVE)
        alive = _alive_at(trial, live.index(max(live)))
        return [
            f"No choice fits the memory budget: the step needs {_size(needed)}, and "
            f"{_size((limit + input_bytes(trial)) / (1 - RESERVE))} are given. It is compiled for "
            "the least that was found. At its peak are alive:",
            *(
                f"{_size(output_bytes(node))} {function_name(_maker(node).target)} "
                f"{user_line(node)}".strip()
                for node in alive[:MOST_LINES]
            ),
        ]


def _alive_at(graph: fx.Graph, position: int) -> list[fx.Node]:
    """Values of a graph that are alive while a node runs, the largest first."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    alive = [
        node
        for node in nodes[: position + 1]
        if node.op == "call_function"
        and not is_view(node)
        and any(place[user] >= position for user in node.users)
    ]
    return sorted(alive, key=output_bytes, reverse=True)


def _maker(node: fx.Node) -> fx.Node:
    """Return the operator whose result a node is, or one of whose results."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else node


def _lines(what: str, nodes: Collection[fx.Node]) -> list[str]:
    """Say what became of values, by the user's line and the operator; the largest first."""
    makers: defaultdict[tuple[str, str], set[fx.Node]] = defaultdict(set)
    size: Counter[tuple[str, str]] = Counter()
    given = set(nodes)
    for node in nodes:
        maker = _maker(node)
        if is_view(node) or is_wait(node) or (maker is not node and maker in given):
            continue
        name = kind(node) if is_launch(node) else function_name(maker.target)
        key = name, user_line(node)
        makers[key].add(maker)
        size[key] += output_bytes(node)
    ordered = sorted(size, key=lambda key: (-size[key], key))
    lines = [
        f"{what}: {len(makers[key])} x {key[0]}, {_size(size[key])} {key[1]}".rstrip()
        for key in ordered
    ]
    more = [f"{what}: {len(lines) - MOST_LINES} smaller kinds of values"] * (
        len(lines) > MOST_LINES
    )
    return lines[:MOST_LINES] + more


class CapSchedule(GraphPass):
    """Let a schedule use what is left of the budget, and no more.

    Requires: nothing.
    Ensures:  nothing is changed but the cap that the scheduler reads.
    Stats:    none.
    """

    name = "cap_schedule"
    needs_collectives = False  # what is kept is reported of every graph

    def __init__(self, budget: float) -> None:
        self.budget = budget

    @classmethod
    def build(cls, context: PassContext) -> CapSchedule:
        return cls(context.extra.get(OPTION, 0))

    @classmethod
    def enabled(cls, options: PassOptions) -> bool:
        return OPTION in options.extra

    def digest(self) -> str:
        return str(self.budget)

    def run(self, graph: fx.Graph) -> PassStats:
        graph.output_node().meta[CAP_BYTES] = value_limit(graph, self.budget)
        return PassStats(changed=False)


class MoveStates(GraphPass):
    """Have the optimizer's states that are marked wait on the host up to their update.

    Requires: nothing.
    Ensures:  the update reads the same values; other nodes stay. The scheduler finds when copies
              start and are awaited.
    Stats:    ``moved_to_host`` (states).
    """

    name = "move_states"
    needs_collectives = False

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    @classmethod
    def build(cls, context: PassContext) -> MoveStates:
        return cls(context.cost)

    @classmethod
    def enabled(cls, options: PassOptions) -> bool:
        return options.extra.get(OFFLOAD) is True

    def run(self, graph: fx.Graph) -> PassStats:
        states = marked_away(graph)
        move_states(graph, states, self.cost)
        return PassStats(changed=bool(states), counters={"moved_to_host": len(states)})


def value_limit(graph: fx.Graph, budget: float) -> int:
    """Return what a graph's own values may take of a budget, in bytes."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    return int((1 - RESERVE) * budget_bytes(budget, device)) - input_bytes(graph)


def input_bytes(graph: fx.Graph) -> int:
    """Return the bytes of a graph's inputs on this rank's device."""
    inputs = (
        node
        for node in graph.find_nodes(op="placeholder")
        if not any(kind(user) == "reload" for user in node.users)
    )
    values = (node.meta.get("val") for node in inputs)
    return sum(tensor_bytes(value) for value in values if isinstance(value, torch.Tensor))


def _size(size: float) -> str:
    if size < 2**17:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
