"""An exact solver for small problems: OR-tools CP-SAT, from the best draft on (extra ``exact``).

Compute and each channel are machines that run one operation at a time; precedences are the tasks'. The
buckets are those of the draft, as single operations. Memory counts a value from its maker's start to its
last reader's end. That differs from the rules of execution in one point, a launch that waits in its
channel's queue, so the referee has the last word on what comes back.
"""

from __future__ import annotations

import importlib
from typing import Any

from inductor_passes.schedule.expand import Step
from inductor_passes.schedule.list_schedule import Draft
from inductor_passes.schedule.tasks import Tasks

MOST_TASKS = 150  # beyond, the search does not end in reasonable time
WORK = 20.0  # of CP-SAT's deterministic time: counted work, not seconds
TICKS = 16  # a microsecond
KIB = 1024


def exact_steps(tasks: Tasks, draft: Draft, cap_bytes: int) -> list[Step] | None:
    """The draft's steps in a better order, or None: too large, nothing better found, or no OR-tools."""
    if tasks.count > MOST_TASKS:
        return None
    try:
        cp_model = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        return None
    model = _Model(cp_model.CpModel(), tasks, draft, cap_bytes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several race each other
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = WORK
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    starts = [solver.value(start) for start in model.start]
    return [draft.steps[s] for s in sorted(range(len(starts)), key=lambda s: (starts[s], s))]


class _Model:
    """One operation per step: ``start`` and ``end`` of each."""

    def __init__(self, model: Any, tasks: Tasks, draft: Draft, cap_bytes: int) -> None:
        self.model = model
        self.tasks = tasks
        self.steps = draft.steps
        horizon = int(draft.makespan_us * TICKS) + len(draft.steps)
        self.start: list[Any] = []
        self.end: list[Any] = []
        machines: dict[str, list[Any]] = {}
        self.step_of: dict[int, int] = {}
        waits_of: dict[tuple[int, ...], int] = {}
        for s, step in enumerate(draft.steps):
            machine, us = self._operation(step)
            ticks = round(us * TICKS)
            start = model.new_int_var(0, horizon, f"start{s}")
            interval = model.new_fixed_size_interval_var(start, ticks, f"step{s}")
            machines.setdefault(machine, []).append(interval)
            self.start.append(start)
            self.end.append(start + ticks)
            if step.waits:
                waits_of[step.tasks] = s
            else:
                self.step_of.update((t, s) for t in step.tasks)
        for intervals in machines.values():
            model.add_no_overlap(intervals)
        for s, step in enumerate(draft.steps):
            if step.waits:
                model.add(self.start[s] >= self.end[self.step_of[step.tasks[0]]])
                continue
            for p in (p for t in step.tasks for p in tasks.preds[t]):
                before = self.step_of[p]
                before = waits_of.get(draft.steps[before].tasks, before)
                model.add(self.start[s] >= self.end[before])
        self._keep_within(cap_bytes, horizon)
        makespan = model.new_int_var(0, horizon, "makespan")
        model.add_max_equality(makespan, self.end)
        model.minimize(makespan)
        for s, step in enumerate(draft.steps):
            ends = max(draft.finish[t] for t in step.tasks)
            started = ends if step.waits else ends - self._operation(step)[1]
            model.add_hint(self.start[s], max(0, round(started * TICKS)))

    def _keep_within(self, cap_bytes: int, horizon: int) -> None:
        """Values from their maker's start to their last reader's end; what a task frees itself, in it."""
        tasks, model = self.tasks, self.model
        holders: dict[int, list[int]] = {}
        for t in range(tasks.count):
            for v in tasks.uses[t]:
                holders.setdefault(v, []).append(self.step_of[t])
        intervals, demands = [], []
        for v, steps in holders.items():
            first = min(steps)  # steps stand in an order that can run: the maker comes first
            gone = model.new_int_var(0, horizon, f"gone{v}")
            model.add_max_equality(gone, [self.end[s] for s in steps])
            size = model.new_int_var(0, horizon, f"held{v}")
            intervals.append(model.new_interval_var(self.start[first], size, gone, f"value{v}"))
            demands.append(tasks.value_bytes[v] // KIB)
        for t in range(tasks.count):
            extra = (tasks.transient[t] - tasks.alloc[t]) // KIB
            length = round(tasks.us[t] * TICKS)
            if extra > 0 and length:
                start = self.start[self.step_of[t]]
                intervals.append(model.new_fixed_size_interval_var(start, length, f"inside{t}"))
                demands.append(extra)
        model.add_cumulative(intervals, demands, cap_bytes // KIB)

    def _operation(self, step: Step) -> tuple[str, float]:
        """Machine and time of a step; what a launch runs ahead of it is too short to count."""
        tasks, problem = self.tasks, self.tasks.problem
        launches = [tasks.launch[t] for t in step.tasks if tasks.launch[t] >= 0]
        if step.waits:
            return "", problem.unpack_us(launches)
        if not launches:
            return "", tasks.us[step.tasks[0]]
        node = problem.nodes[launches[0]]
        payload = sum(problem.nodes[i].payload for i in launches)
        return node.group, problem.link_us(node.group, node.op, payload)
