"""Choose for every step so that the whole costs least: an integer programme over the local
polytope.

A binary variable per choice of a step, a continuous one per pair of placements across an edge;
HiGHS through scipy. The relaxation is tight on chains and trees, and seldom loose elsewhere: its
value is the bound that a plan is reported against. Without scipy, and where HiGHS finds nothing,
upstream's choices are improved one at a time instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_dist.planning.cost import Costs
from dynamo_dist.program import Choice, Program, Ref, Spec

RELATIVE_GAP = 5e-4
# Nodes and not seconds: ranks that stop at another moment would carry out other plans and hang.
NODE_LIMIT = 2000


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Choices of each step, and the step that each is tied to (``planner.py``)."""

    program: Program
    choices: Sequence[Sequence[Choice]]
    roots: Sequence[int]
    costs: Costs

    def move_us(self, index: int, argument: int, source: Spec, target: Spec) -> float:
        """Return the cost of bringing an input of a step from ``source`` to ``target``."""
        step = self.program.steps[index]
        if source == target:
            return 0.0
        if step.in_place and argument == 0:
            return math.inf
        value = self.program.value(step.inputs[argument])
        us = self.costs.move_us(value, source, target, step.mesh)
        return us + self.costs.apart_us(index, argument, source, target)

    def source_spec(self, ref: Ref, chosen: Sequence[Choice]) -> Spec:
        """Return the placements in which an input lies when a step reads it."""
        if ref.step < 0:
            return self.program.sources[-1 - ref.step].spec
        found = chosen[ref.step].outputs[ref.output]
        assert found is not None
        return found

    def total_us(self, chosen: Sequence[Choice]) -> tuple[float, float]:
        """Communication and computation of the whole."""
        moves = compute = 0.0
        for i, step in enumerate(self.program.steps):
            compute += self.costs.compute_us(i, chosen[i])
            for a, ref in enumerate(step.inputs):
                moves += self.move_us(i, a, self.source_spec(ref, chosen), chosen[i].inputs[a])
        return moves, compute


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for every step; ``bound_us`` is a lower bound of what any plan of the problem
    costs.
    """

    chosen: list[Choice]
    bound_us: float
    method: str


def solve_placements(problem: PlacementProblem, start: Sequence[Choice]) -> Solution:
    """The best choices found; never worse than ``start``, which must be among the choices."""
    best = list(start)
    bound, method = 0.0, "greedy"
    try:
        found, bound = _Programme(problem).run()
        method = "integer programme"
    except ImportError:
        found = None
    if found is None:
        found, method = improve(problem, best), "greedy"
    if sum(problem.total_us(found)) < sum(problem.total_us(best)):
        best = found
    else:
        method = "upstream"
    return Solution(best, bound, method)


def improve(problem: PlacementProblem, start: Sequence[Choice], rounds: int = 20) -> list[Choice]:
    """Change one step at a time while that lowers the cost."""
    steps, chosen = problem.program.steps, list(start)
    readers: dict[int, list[tuple[int, int]]] = {}
    for i, step in enumerate(steps):
        for a, ref in enumerate(step.inputs):
            readers.setdefault(ref.step, []).append((i, a))

    def around(i: int, choice: Choice) -> float:
        total = problem.costs.compute_us(i, choice)
        for a, ref in enumerate(steps[i].inputs):
            total += problem.move_us(i, a, problem.source_spec(ref, chosen), choice.inputs[a])
        for j, a in readers.get(i, ()):
            spec = choice.outputs[steps[j].inputs[a].output]
            assert spec is not None
            total += problem.move_us(j, a, spec, chosen[j].inputs[a])
        return total

    for _ in range(rounds):
        changed = False
        for i, options in enumerate(problem.choices):
            if len(options) < 2:
                continue
            best = min(options, key=lambda choice: around(i, choice))
            if around(i, best) < around(i, chosen[i]) - 1e-9:
                chosen[i], changed = best, True
        if not changed:
            break
    return chosen


class _Programme:
    """The integer programme: columns, rows, and how to read a solution."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.cost: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[tuple[float, list[int], list[float]]] = []
        self.columns: dict[int, list[int]] = {}
        self._steps()
        self._edges()

    def _column(self, cost: float, *, binary: bool) -> int:
        self.cost.append(cost)
        self.binary.append(binary)
        return len(self.cost) - 1

    def _steps(self) -> None:
        p = self.problem
        times = Counter(p.roots)
        for i in range(len(p.program.steps)):
            if p.roots[i] != i:
                continue
            self.columns[i] = [
                self._column(times[i] * p.costs.compute_us(i, choice), binary=True)
                for choice in p.choices[i]
            ]
            self.rows.append((1.0, self.columns[i], [1.0] * len(self.columns[i])))

    def _edges(self) -> None:
        p = self.problem
        edges: Counter[tuple[object, int, int, int, int]] = Counter()
        for i, step in enumerate(p.program.steps):
            for a, ref in enumerate(step.inputs):
                if ref.step < 0:
                    key: object = p.program.sources[-1 - ref.step].spec
                    edges[(key, -1, 0, p.roots[i], a)] += 1
                else:
                    edges[(None, p.roots[ref.step], ref.output, p.roots[i], a)] += 1
        for (spec, producer, output, consumer, a), times in edges.items():
            targets = self._classes(consumer, [c.inputs[a] for c in p.choices[consumer]])
            sources: dict[Spec, list[int]]
            if producer < 0:
                sources = {spec: []}  # type: ignore[dict-item]
            else:
                made = [c.outputs[output] for c in p.choices[producer]]
                sources = self._classes(producer, made)
            self._edge(consumer, a, sources, targets, times)

    def _classes(self, index: int, specs: Sequence[Spec | None]) -> dict[Spec, list[int]]:
        """The columns of a step by the spec that each choice has at one of its ends."""
        found: dict[Spec, list[int]] = {}
        for column, spec in zip(self.columns[index], specs, strict=True):
            assert spec is not None
            found.setdefault(spec, []).append(column)
        return found

    def _edge(
        self,
        consumer: int,
        argument: int,
        sources: dict[Spec, list[int]],
        targets: dict[Spec, list[int]],
        times: int,
    ) -> None:
        move = self.problem.move_us
        if len(sources) == 1 or len(targets) == 1:  # one end is known: the cost is the other's
            for source, source_columns in sources.items():
                for target, target_columns in targets.items():
                    us = move(consumer, argument, source, target)
                    columns = target_columns if len(sources) == 1 else source_columns
                    for column in columns:
                        self._charge(column, times * us)
            return
        into: dict[Spec, list[int]] = {target: [] for target in targets}
        for source, source_columns in sources.items():
            out = []
            for target in targets:
                us = move(consumer, argument, source, target)
                if not math.isinf(us):
                    column = self._column(times * us, binary=False)
                    out.append(column)
                    into[target].append(column)
            self._balance(out, source_columns)
        for target, columns in into.items():
            self._balance(columns, targets[target])

    def _balance(self, flow: list[int], chosen: list[int]) -> None:
        self.rows.append((0.0, [*flow, *chosen], [1.0] * len(flow) + [-1.0] * len(chosen)))

    def _charge(self, column: int, us: float) -> None:
        if math.isinf(us):
            self.rows.append((0.0, [column], [1.0]))
        else:
            self.cost[column] += us

    def run(self) -> tuple[list[Choice] | None, float]:
        """Solve the relaxation, and the programme itself if that is fractional."""
        # scipy takes as long to import as a small plan takes to solve; without it, greedy does.
        import numpy as np
        from scipy.optimize import (  # type: ignore[import-untyped]
            Bounds,
            LinearConstraint,
            milp,
        )
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        starts = np.cumsum([0, *(len(row[1]) for row in self.rows)])
        indices = np.concatenate([row[1] for row in self.rows])
        data = np.concatenate([row[2] for row in self.rows])
        matrix = csr_array((data, indices, starts), shape=(len(self.rows), len(self.cost)))
        right = np.array([row[0] for row in self.rows])
        constraint = LinearConstraint(matrix, right, right)
        bounds = Bounds(0.0, 1.0)
        binary = np.array(self.binary)
        relaxed = milp(self.cost, constraints=constraint, bounds=bounds)
        if relaxed.x is None:
            return None, 0.0
        x, bound = relaxed.x, float(relaxed.fun)
        if np.abs(x[binary] - x[binary].round()).max() > 1e-5:
            result = milp(
                self.cost,
                constraints=constraint,
                bounds=bounds,
                integrality=binary.astype(int),
                options={"mip_rel_gap": RELATIVE_GAP, "node_limit": NODE_LIMIT},
            )
            if result.x is None:
                return None, bound
            x, bound = result.x, max(bound, float(result.mip_dual_bound))
        p = self.problem
        picked = {
            i: p.choices[i][int(np.argmax(x[columns]))] for i, columns in self.columns.items()
        }
        return [picked[p.roots[i]] for i in range(len(p.program.steps))], bound
