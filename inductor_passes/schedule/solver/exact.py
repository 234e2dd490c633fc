"""An exact solver for small problems: OR-tools CP-SAT, from the best draft on (extra ``exact``).

Every step has a place on the compute stream; a launch also has a transfer on its channel, which starts no
earlier than its place. Precedences are the tasks', the buckets those of the draft. Memory counts a value
from its maker's place to its last reader's. The referee has the last word on what comes back.
"""

from __future__ import annotations

import importlib
from typing import Any

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.draft import Draft
from inductor_passes.schedule.solver.expand import Step

MOST_TASKS = 150  # beyond, the search does not end in reasonable time
WORK = 20.0  # of CP-SAT's deterministic time: counted work, not seconds
TICKS = 16  # a microsecond
KIB = 1024


def exact_steps(tasks: Tasks, draft: Draft, cap_bytes: int) -> list[Step] | None:
    """The draft's steps in a better order, or None: too large, none found, or no OR-tools."""
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

    def key(s: int) -> tuple[int, int, int, int]:
        # At one place, what takes no time there stands first, and launches as their channel has them.
        ends = solver.value(model.left[s]), solver.value(model.end[s])
        return (solver.value(model.place[s]), *ends, s)

    return [draft.steps[s] for s in sorted(range(len(draft.steps)), key=key)]


class _Model:
    """Variables by step: ``place`` on the compute stream, ``left`` when it leaves it, ``end``."""

    def __init__(self, model: Any, tasks: Tasks, draft: Draft, cap_bytes: int) -> None:
        self.model = model
        self.tasks = tasks
        self.steps = draft.steps
        # Rounding may add a tick a step.
        self.horizon = int(draft.makespan_us * TICKS) + 2 * len(draft.steps)
        self.place: list[Any] = []
        self.left: list[Any] = []
        self.end: list[Any] = []
        self.step_of: dict[int, int] = {}
        self._add_steps()
        self._add_precedences()
        self._keep_within(cap_bytes)
        makespan = model.new_int_var(0, self.horizon, "makespan")
        model.add_max_equality(makespan, self.end)
        model.minimize(makespan)

    def _add_steps(self) -> None:
        model, machines = self.model, dict[str, list[Any]]()
        launches: dict[str, list[int]] = {}
        for s, step in enumerate(self.steps):
            group, on_stream, on_link = self._times(step)
            place = model.new_int_var(0, self.horizon, f"place{s}")
            # Of no length or not, nothing is placed in the middle of compute.
            interval = model.new_fixed_size_interval_var(place, on_stream, f"step{s}")
            machines.setdefault("", []).append(interval)
            self.place.append(place)
            self.left.append(place + on_stream)
            self.end.append(place + on_stream)
            if group:
                start = model.new_int_var(0, self.horizon, f"start{s}")
                transfer = model.new_fixed_size_interval_var(start, on_link, f"transfer{s}")
                machines.setdefault(group, []).append(transfer)
                model.add(start >= place + on_stream)
                self.end[s] = start + on_link
                for other in launches.setdefault(group, []):
                    self._first_in_first_out(other, s)
                launches[group].append(s)
            if not step.waits:
                self.step_of.update((t, s) for t in step.tasks)
        for intervals in machines.values():
            model.add_no_overlap(intervals)

    def _first_in_first_out(self, one: int, other: int) -> None:
        """Two launches of a channel: in the order of their places."""
        first = self.model.new_bool_var(f"first{one}_{other}")
        for a, b, holds in ((one, other, first), (other, one, ~first)):
            self.model.add(self.left[a] <= self.place[b]).only_enforce_if(holds)
            self.model.add(self.end[a] <= self.end[b]).only_enforce_if(holds)

    def _add_precedences(self) -> None:
        waits = {step.tasks: s for s, step in enumerate(self.steps) if step.waits}
        for s, step in enumerate(self.steps):
            if step.waits:
                self.model.add(self.place[s] >= self.end[self.step_of[step.tasks[0]]])
                continue
            for before in {self.step_of[p] for t in step.tasks for p in self.tasks.preds[t]}:
                last = waits.get(self.steps[before].tasks, before)
                self.model.add(self.place[s] >= self.end[last])

    def _keep_within(self, cap_bytes: int) -> None:
        tasks, model = self.tasks, self.model
        holders: dict[int, list[int]] = {}
        for t in range(tasks.count):
            for v in tasks.uses[t]:
                holders.setdefault(v, []).append(self.step_of[t])
        intervals, demands = [], []
        for v, steps in holders.items():
            gone = model.new_int_var(0, self.horizon, f"gone{v}")
            model.add_max_equality(gone, [self.left[s] for s in steps])
            held = model.new_int_var(0, self.horizon, f"held{v}")
            maker = min(steps)  # steps stand in an order that can run
            intervals.append(model.new_interval_var(self.place[maker], held, gone, f"value{v}"))
            demands.append(tasks.value_bytes[v] // KIB)
        for t in range(tasks.count):
            extra = (tasks.transient[t] - tasks.alloc[t]) // KIB
            if extra > 0 and round(tasks.us[t] * TICKS):
                place, size = self.place[self.step_of[t]], round(tasks.us[t] * TICKS)
                intervals.append(model.new_fixed_size_interval_var(place, size, f"inside{t}"))
                demands.append(extra)
        model.add_cumulative(intervals, demands, cap_bytes // KIB)

    def _times(self, step: Step) -> tuple[str, int, int]:
        """Group of a launch or "", ticks on the compute stream, ticks on the link."""
        tasks, problem = self.tasks, self.tasks.problem
        launches = [tasks.launch[t] for t in step.tasks if tasks.launch[t] >= 0]
        if step.waits:
            return "", round(problem.unpack_us(launches) * TICKS), 0
        us = sum(tasks.us[t] for t in step.tasks)
        if not launches:
            return "", round(us * TICKS), 0
        node = problem.nodes[launches[0]]
        payload = sum(problem.nodes[i].payload for i in launches)
        us += problem.pack_us(launches) if len(launches) > 1 else 0.0
        link_us = problem.link_us(node.group, node.op, payload)
        return node.group, round(us * TICKS), round(link_us * TICKS)
