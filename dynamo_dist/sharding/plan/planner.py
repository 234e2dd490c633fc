"""From a recorded program to a plan: choices, what they cost, and what stock's would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.errors import PlanError
from dynamo_dist.program import Choice, Program, stock_choice
from dynamo_dist.sharding.plan.cost import Costs, Prices, is_view
from dynamo_dist.sharding.plan.repeats import roots
from dynamo_dist.sharding.plan.solve import PlacementProblem, solve_placements
from dynamo_dist.sharding.plan.strategies import Strategies

# How often a choice that DTensor refuses on the real mesh is struck out before giving up.
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice for every step, modelled times in microseconds, and how far the plan is from the bound."""

    program: Program
    choices: tuple[Choice, ...]
    stock_us: tuple[float, float]
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
    schemas: Sequence[Any],
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
    stock = [stock_choice(step) for step in program.steps]
    costs = Costs(program, prices)
    for _ in range(ROUNDS):
        problem = PlacementProblem(program, choices, tied, costs)
        solution = solve_placements(problem, stock)
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
            PlacementProblem(program, [[c] for c in stock], tied, costs), stock
        )
    return Plan(
        program,
        tuple(solution.chosen),
        problem.total_us(stock),
        problem.total_us(solution.chosen),
        solution.bound_us,
        solution.method,
        time.perf_counter() - start,
    )


def _check_writes(program: Program) -> None:
    """Redistributing a tensor cuts it from its views: what writes through one must stay as it is."""
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
