"""Use the memory that a schedule leaves below the cap: launch earlier, and wait later.

List scheduling decides once, at each place, and near the cap it often starts a collective only
where its result is read. Here each exposed launch moves up, with what it alone needs, or its wait
down to what reads it, until enough compute lies between the two or memory does not allow more.
All else keeps its order, each channel too.
"""

from __future__ import annotations

from inductor_passes.schedule.solver.evaluate import Evaluation, evaluate
from inductor_passes.schedule.solver.problem import Problem, Schedule

ROUNDS = 8  # launches up and waits down in turns; each sees what is exposed after the one before
LEAST_GAIN = 1e-3


def with_slack_used(
    problem: Problem, schedule: Schedule, evaluated: Evaluation, cap_bytes: int
) -> tuple[Schedule, Evaluation]:
    """Return a schedule that is at least as short, within the cap if ``schedule`` is."""
    failed = 0
    for number in range(ROUNDS):
        exposed = evaluated.exposed_by_launch
        if failed == 2 or not exposed or evaluated.peak_bytes > cap_bytes:
            break
        moves = _Moves(problem, schedule, evaluated, cap_bytes)
        move = moves.down if number % 2 else moves.up
        for launch in sorted(exposed, key=moves.place.__getitem__):
            move(launch, exposed[launch])
        tried = Schedule(tuple(moves.order), schedule.buckets)
        found = evaluate(problem, tried)
        most_us = (1 - LEAST_GAIN) * evaluated.makespan_us
        failed += 1
        if found.peak_bytes <= cap_bytes and found.makespan_us <= most_us:
            schedule, evaluated, failed = tried, found, 0
    return schedule, evaluated


class _Moves:
    """A schedule's order, its memory at each place, and moves within it."""

    def __init__(
        self, problem: Problem, schedule: Schedule, evaluated: Evaluation, cap_bytes: int
    ) -> None:
        self.nodes, self.cap_bytes = problem.nodes, cap_bytes
        self.order = list(schedule.order)
        self.place = [0] * len(self.order)
        for p, i in enumerate(self.order):
            self.place[i] = p
        self.live = [evaluated.live_bytes[i] for i in self.order]
        self.users: list[list[int]] = [[] for _ in self.nodes]
        self.waits: dict[int, list[int]] = {}
        self.owner: list[int] = []
        for i, node in enumerate(self.nodes):
            self.owner.append(i if node.alias is None else self.owner[node.alias])
            for d in node.deps:
                self.users[d].append(i)
            if node.launch is not None:
                self.waits.setdefault(node.launch, []).append(i)
        # Members of a bucket stand next to each other, and so do their waits.
        self.run: dict[int, int] = {}
        self.bucket: dict[int, list[int]] = {}
        for number, members in enumerate(schedule.buckets):
            ordered = sorted(members, key=self.place.__getitem__)
            for member in members:
                self.bucket[member] = ordered
                self.run[member] = 2 * number
                self.run.update(dict.fromkeys(self.waits.get(member, ()), 2 * number + 1))

    def up(self, launch: int, us: float) -> None:
        """Start a launch, with its bucket, earlier by the compute time ``us``, or as far as it
        may.
        """
        group, members = self.nodes[launch].group, self.bucket.get(launch, [launch])
        unit = members[::-1]
        needed = {d for member in members for d in self.nodes[member].deps}
        # A wait reads what its launch reads.
        inside = {*members, *(wait for member in members for wait in self.waits.get(member, ()))}
        at = best = self.place[members[0]]
        highest, passed = 0, 0.0
        added = sum(map(self._bytes, members))
        if len(members) > 1:
            added += sum(self.nodes[member].payload for member in members)  # packed
        while at > 0 and passed < us:
            i = self.order[at - 1]
            node = self.nodes[i]
            if i in needed:
                if not self._goes_along(i, inside):
                    break
                unit.append(i)
                inside.add(i)
                needed.update(node.deps)
                added += self._bytes(i)
            elif node.group == group and (node.kind == "launch" or node.blocks):
                break
            else:
                highest = max(highest, self.live[at - 1])
                if highest + added > self.cap_bytes:
                    break
                passed += node.us
            at -= 1
            if not self._is_inside_run(at):
                best = at
        moved = [i for i in reversed(unit) if self.place[i] >= best]
        stretch = self.order[best : self.place[moved[-1]] + 1]
        passed_over = [i for i in stretch if i not in moved]
        if passed_over:
            self._reorder(best, [*moved, *passed_over], added)

    def down(self, launch: int, us: float) -> None:
        """Wait for a launch later by the compute time ``us``, or as far as it may."""
        waits = self.waits.get(launch, ())
        if launch in self.run or len(waits) != 1:
            return
        wait = waits[0]
        unit, inside = [wait], {wait}
        # What the launch reads is alive until the wait.
        read = {self.owner[d] for d in self.nodes[wait].deps} - {self.owner[launch]}
        held = sum(map(self._bytes, read))
        start = at = self.place[wait]
        best, size, passed = at, 1, 0.0
        while at + 1 < len(self.order) and passed < us:
            i = self.order[at + 1]
            node = self.nodes[i]
            if not inside.isdisjoint(node.deps):
                if not self._is_free(i):
                    break  # what it reads would live longer
                unit.append(i)
                inside.add(i)
            else:
                if self.live[at + 1] + held > self.cap_bytes:
                    break
                passed += node.us
            at += 1
            if not self._is_inside_run(at + 1):
                best, size = at, len(unit)
        moved = unit[:size]
        passed_over = [i for i in self.order[start : best + 1] if i not in moved]
        if passed_over:
            self._reorder(start, [*passed_over, *moved], held)

    def _reorder(self, start: int, nodes: list[int], more_bytes: int) -> None:
        """Put nodes from a place on, in a new order in which more memory is alive."""
        live = [self.live[self.place[i]] + more_bytes for i in nodes]
        for p, (i, size) in enumerate(zip(nodes, live, strict=True), start):
            self.order[p], self.place[i], self.live[p] = i, p, size

    def _goes_along(self, i: int, unit: set[int]) -> bool:
        node = self.nodes[i]
        if node.kind == "input" or self._is_free(i):
            return True
        return node.kind == "compute" and not node.blocks and unit.issuperset(self.users[i])

    def _is_free(self, i: int) -> bool:
        """Return whether a node takes neither time nor memory, as a view does."""
        node = self.nodes[i]
        return node.kind == "compute" and node.us == 0 and node.bytes == 0

    def _bytes(self, i: int) -> int:
        node = self.nodes[i]
        return node.bytes if node.alias is None and node.kind not in ("input", "output") else 0

    def _is_inside_run(self, at: int) -> bool:
        """Return whether what stands at a place and what stands before it are of one bucket."""
        if not 0 < at < len(self.order):
            return False
        run = self.run.get(self.order[at])
        return run is not None and run == self.run.get(self.order[at - 1])
