"""Record a program, find its repeated layers, and plan it.

Two steps are equivalent if op, shapes, choices and traffic agree and their inputs come from
equivalent steps at the same distance. A program of L equal layers then shows L runs of equivalent
steps, forward and backward. The inner layers are tied to the second, so that the plan of the first,
the last and one inner layer is the plan of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.errors import PlanError
from dynamo_dist.planning.cost import Costs, Prices, accesses_of, is_view
from dynamo_dist.planning.solve import PlacementProblem, solve_placements
from dynamo_dist.planning.strategies import Strategies
from dynamo_dist.planning.trace import Session, bracketed
from dynamo_dist.program import Choice, Program, upstream_choice
from dynamo_dist.torch_compat import aot_tracing, dtensor_placements


@dataclass(frozen=True, slots=True)
class Recording:
    """The program, and of each step what DTensor would be asked about it."""

    program: Program
    schemas: list[object]
    meshes: list[DeviceMesh]


def record(gm: fx.GraphModule, inputs: Sequence[object]) -> Recording:
    """Every operation of the forward and, if it is trained, of the backward of a Dynamo graph.

    Call it where a ``torch.compile`` backend is called. Nothing is compiled or run.
    """
    session = Session()
    with session.active():
        aot_tracing.trace_only(bracketed(gm, inputs), inputs)
    # Not while tracing, where a mesh cannot be looked at.
    session.program.meshes.extend(dtensor_placements.mesh_info(mesh) for mesh in session.meshes)
    session.program.accesses.extend(accesses_of(session.program, session.schemas))
    return Recording(session.program, session.schemas, session.meshes)


# Shorter runs than this are no layers, and ties of them would save nothing.
LEAST_STEPS = 4


def roots(program: Program) -> list[int]:
    """Return each step's root: the step itself, or its equivalent in an earlier layer."""
    found = list(range(len(program.steps)))
    words = [_word(program, i) for i in range(len(program.steps))]
    split = _turn(program)
    for start, end in ((0, split), (split, len(words))):
        for first, period, count in _runs(words[start:end]):
            # Layers 0 and count - 1 meet what is not a layer: they stay free.
            for layer in range(2, count - 1):
                for i in range(period):
                    found[start + first + layer * period + i] = start + first + period + i
    return found


def _word(program: Program, index: int) -> object:
    step = program.steps[index]
    values = tuple(program.value(ref) for ref in step.inputs)
    upstream, access = upstream_choice(step), program.access(index)
    return step.kind, step.text, values, step.outputs, step.mesh, step.fixed, upstream, access


def _turn(program: Program) -> int:
    """The first step of the backward: the first to read a source that is no input; else the end."""
    for i, step in enumerate(program.steps):
        for ref in step.inputs:
            if ref.step < 0 and not program.sources[-1 - ref.step].is_input and i > 0:
                return i
    return len(program.steps)


def _runs(words: Sequence[object]) -> list[tuple[int, int, int]]:
    """List the places where a block of words stands three or more times in a row: its start,
    length and count.
    """
    ids: dict[object, int] = {}
    sequence = [ids.setdefault(word, len(ids)) for word in words]
    found, at = [], 0
    while at < len(sequence):
        best = (0, 0)
        for period in range(LEAST_STEPS, (len(sequence) - at) // 3 + 1):
            if sequence[at] != sequence[at + period]:
                continue
            same = 0
            while at + period + same < len(sequence) and (
                sequence[at + same] == sequence[at + period + same]
            ):
                same += 1
            count = same // period + 1
            if count >= 3 and count * period > best[0] * max(best[1], 1):
                best = (count, period)
                break
        count, period = best
        if count:
            found.append((at, period, count))
            at += count * period
        else:
            at += 1
    return found


# How often a choice that DTensor refuses on the real mesh is struck out before giving up.
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice for every step, modelled times in microseconds, and how far the plan is from the
    bound.
    """

    program: Program
    choices: tuple[Choice, ...]
    upstream_us: tuple[float, float]
    planned_us: tuple[float, float]
    bound_us: float
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """The share by which another plan could be cheaper than this one, at most."""
        total = sum(self.planned_us)
        return max(0.0, 1.0 - self.bound_us / total) if total else 0.0


def plan(
    program: Program,
    schemas: Sequence[object],
    meshes: Sequence[DeviceMesh],
    prices: Prices,
) -> Plan:
    """Solve for every placement that the user has not set.

    Raises PlanError for a program that writes into views, whose placements cannot change.
    """
    start = time.perf_counter()
    _check_writes(program)
    strategies = Strategies(program, schemas, meshes)
    tied = roots(program)
    choices = [strategies.of(i) if tied[i] == i else [] for i in range(len(program.steps))]
    for i, root in enumerate(tied):
        choices[i] = choices[root]
    upstream = [upstream_choice(step) for step in program.steps]
    costs = Costs(program, prices)
    for _ in range(ROUNDS):
        problem = PlacementProblem(program, choices, tied, costs)
        solution = solve_placements(problem, upstream)
        refused = {
            (tied[i], choice)
            for i, choice in enumerate(solution.chosen)
            if tied[i] == i and not strategies.accepts(i, choice)
        }
        if not refused:
            break
        for i, choice in refused:
            kept = [c for c in choices[i] if c != choice]
            for j, root in enumerate(tied):
                if root == i:
                    choices[j] = kept
    else:
        solution = solve_placements(
            PlacementProblem(program, [[c] for c in upstream], tied, costs), upstream
        )
    return Plan(
        program,
        tuple(solution.chosen),
        problem.total_us(upstream),
        problem.total_us(solution.chosen),
        solution.bound_us,
        solution.method,
        time.perf_counter() - start,
    )


def _check_writes(program: Program) -> None:
    """Redistributing a tensor cuts it from its views: what writes through one must stay as it
    is.
    """
    for step in program.steps:
        if not step.in_place:
            continue
        ref = step.inputs[0]
        producer = program.steps[ref.step] if ref.step >= 0 else None
        if producer is None or producer.kind != "op" or is_view(producer.text):
            raise PlanError(
                f"The program writes in place into a view or an input ({step.text.split()[0]}).",
                "Its placements cannot be planned anew.",
                "Use the out-of-place operation, or plan='off'.",
            )
