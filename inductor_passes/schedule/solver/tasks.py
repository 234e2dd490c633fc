"""Contract a problem to the tasks that a scheduler moves, with what each holds in memory.

Four kinds of node never profit from standing apart: views and waits join what they view or wait
for; cheap compute that waits for nothing and has one reader (the cast of a parameter in front of
its gather) joins that reader; chains of compute join while they are short; inputs and views of
inputs stand first. Each join contracts edges into a group with no other way in, or out of one with
no other way out, so that no cycle can appear.

A task is compute, or one launch with the cheap compute that only it needs. Expanding a sequence of
tasks gives an order of the nodes (``expand`` in ``list_scheduler.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inductor_passes.schedule.solver.problem import RELOAD, Problem

AT_START = -1  # the group of inputs and views of inputs: they cost nothing and stand first
GRAIN = 2000  # a joined task takes at most this part of all compute


def group_nodes(problem: Problem) -> list[int]:
    """For each node the node that names its group, or ``AT_START``. Linear in nodes and edges."""
    group = _views(problem)
    us = [node.us for node in problem.nodes]
    is_compute = [node.kind == "compute" and not node.blocks for node in problem.nodes]
    grain = sum(us) / GRAIN

    before, after = _neighbours(problem, group)
    into: dict[int, int] = {}
    for g in sorted(before):
        if not before[g] and len(after[g]) == 1 and is_compute[g] and us[g] <= grain:
            (reader,) = after[g]
            # A collective that blocks stays a task of its own: what joined it would be held up with
            # it, and it has one channel to hold.
            if problem.nodes[reader].blocks:
                continue
            # A reader may be joined to its own reader later in this loop: ``_follow`` resolves the
            # chain.
            into[g] = reader
            us[reader] += us[g] if is_compute[reader] else 0.0
            del before[reader][g]
    group = [_follow(into, g) for g in group]

    before, after = _neighbours(problem, group)
    into = {}
    for g in sorted(before):
        if len(before[g]) != 1 or not is_compute[g]:
            continue
        # Its only way in, and the only way out of the one above: contracting such an edge can close
        # no cycle.
        (above,) = before[g]
        first = _follow(into, above)
        if len(after[above]) == 1 and is_compute[above] and us[first] + us[g] <= grain:
            into[g] = first
            us[first] += us[g]
    return [_follow(into, g) for g in group]


def _views(problem: Problem) -> list[int]:
    """Groups after views and waits have joined what they view; each is named by its first node."""
    group: list[int] = []
    for i, node in enumerate(problem.nodes):
        deps: Iterable[int] = node.deps
        if node.launch is not None:
            # What the launch reads may be named to be kept until then; the launch is behind it
            # anyway.
            deps = {*node.deps, node.launch} - set(problem.nodes[node.launch].deps)
        before = {group[d] for d in deps} - {AT_START}
        if node.kind == "input" or (not before and costs_nothing(problem, i)):
            group.append(AT_START)
        elif len(before) == 1 and (node.launch is not None or costs_nothing(problem, i)):
            group.append(*before)
        else:
            group.append(i)
    return group


def costs_nothing(problem: Problem, i: int) -> bool:
    """Neither time nor memory: a view, or a wait for a value launched outside the graph."""
    node = problem.nodes[i]
    free = node.us == 0 and (node.bytes == 0 or node.alias is not None)
    return free and node.launch is None and node.kind in ("compute", "wait")


def _neighbours(
    problem: Problem, group: list[int]
) -> tuple[dict[int, dict[int, None]], dict[int, dict[int, None]]]:
    """Groups before and after each group, as ordered sets."""
    before: dict[int, dict[int, None]] = {}
    after: dict[int, dict[int, None]] = {}
    for g in group:
        if g != AT_START:
            before.setdefault(g, {})
            after.setdefault(g, {})
    for i, node in enumerate(problem.nodes):
        for d in node.deps:
            if AT_START != group[d] != group[i]:
                before[group[i]][group[d]] = None
                after[group[d]][group[i]] = None
    return before, after


def _follow(into: dict[int, int], g: int) -> int:
    while g in into:
        g = into[g]
    return g


class Tasks:
    """Hold the tasks of a problem, as parallel lists indexed by task number.

    Tasks are numbered in an order they can run in, which follows the program.
    ``at_start``: nodes that stand in front of all tasks.
    ``before[t]``: node ids that run on the compute stream in task t, in order. If the task has a
        launch, they run ahead of it.
    ``launch[t]``: node id of its launch, or -1.
    ``behind[t]``: the waits of a launch, and views of them.
    ``us[t]``: compute time. ``link_us[t]``: time of the launch alone.
    ``blocks[t]``: the group whose channel its compute holds, or "".
    ``preds[t]``, ``succs[t]``: tasks.
    ``loose[t]``: of a launch, whether it could go long before its result is read, and hold memory
        all that time: it waits for nothing, or brings back what is on the host. What goes to the
        host frees memory, the sooner the better.
    ``alloc[t]``: bytes that outlive the task.
    ``transient[t]``: most bytes above what was live before.
    ``uses[t]``: values it makes or reads.
    ``kept[t]``: of a launch, those values that its wait names and that therefore live until then.
    ``kept_inside[t]``: bytes of such values that no other task holds.
    ``value_bytes[v]``, ``value_users[v]``: bytes of value v, and how many tasks hold it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        group = group_nodes(problem)
        gathered: dict[int, list[int]] = {}
        for i, g in enumerate(group):
            gathered.setdefault(g, []).append(i)
        self.at_start = gathered.pop(AT_START, [])
        self.before: list[list[int]] = []
        self.launch: list[int] = []
        self.behind: list[list[int]] = []
        split = [_split(problem, members) for members in gathered.values()]
        for before, launch, behind in sorted(split, key=lambda parts: _last(problem, parts)):
            self.before.append(before)
            self.launch.append(launch)
            self.behind.append(behind)
        self.count = len(self.before)
        task_of = [AT_START] * len(problem.nodes)
        for t in range(self.count):
            for i in self.nodes_of(t):
                task_of[i] = t
        self.task_of = task_of
        self.us = [sum(problem.nodes[i].us for i in nodes) for nodes in self.before]
        self.link_us = [problem.launch_us(i) if i >= 0 else 0.0 for i in self.launch]
        self.payload = [problem.nodes[i].payload if i >= 0 else 0 for i in self.launch]
        self.group = [problem.nodes[i].group if i >= 0 else "" for i in self.launch]
        held = [[problem.nodes[i].group for i in nodes] for nodes in self.before]
        self.blocks = ["".join(groups) for groups in held]  # it is a task of its own, with views
        self._link()
        self._account()
        # Compute that waits for no bound compute, and for no launch but copies of inputs; and the
        # first compute that needs each task.
        self.floating: list[bool] = []
        for t, before in enumerate(self.preds):
            # Program order is topological, so that all predecessors have their answer.
            may_float = self.launch[t] < 0 or bool(problem.nodes[self.launch[t]].copies)
            self.floating.append(may_float and all(self.floating[p] for p in before))
        self.needed_by = list(range(self.count))
        for t in range(self.count - 1, -1, -1):
            if self.launch[t] >= 0:
                readers = (self.needed_by[s] for s in self.succs[t])
                # A launch is needed when its first reader is; readers stand behind it and are known
                # already.
                self.needed_by[t] = min(readers, default=self.count)

    def nodes_of(self, t: int) -> list[int]:
        """All nodes of a task."""
        launch = [self.launch[t]] if self.launch[t] >= 0 else []
        return self.before[t] + launch + self.behind[t]

    def _link(self) -> None:
        preds: list[set[int]] = [set() for _ in range(self.count)]
        for i, node in enumerate(self.problem.nodes):
            t = self.task_of[i]
            for d in (*node.deps, *(() if node.launch is None else (node.launch,))):
                if t != AT_START and self.task_of[d] not in (t, AT_START):
                    preds[t].add(self.task_of[d])
        self.preds = [sorted(before) for before in preds]
        self.succs: list[list[int]] = [[] for _ in range(self.count)]
        for t, before in enumerate(self.preds):
            for p in before:
                self.succs[p].append(t)
        self.loose: list[bool] = []
        for launch, before in zip(self.launch, self.preds, strict=True):
            copies = self.problem.nodes[launch].copies if launch >= 0 else ""
            self.loose.append(launch >= 0 and (copies == RELOAD or not (before or copies)))

    def _account(self) -> None:
        """Fill in which tasks hold which bytes."""
        nodes, task_of = self.problem.nodes, self.task_of
        owner = [0] * len(nodes)
        holders: dict[int, dict[int, None]] = {}
        for i, node in enumerate(nodes):
            # One pass resolves chains of views, since an alias stands before what shares its
            # memory.
            owner[i] = i if node.alias is None else owner[node.alias]
            if owner[i] == i and node.bytes and node.kind not in ("input", "output"):
                # Dicts as ordered sets: the order of tasks decides nothing here, but it must be the
                # same on all ranks.
                holders[i] = {task_of[i]: None}
            for d in node.deps:
                if owner[d] in holders:
                    holders[owner[d]][task_of[i]] = None
        self.value_bytes: list[int] = []
        self.value_users: list[int] = []
        self.uses: list[list[int]] = [[] for _ in range(self.count)]
        self.alloc = [0] * self.count
        self.kept: list[list[int]] = [[] for _ in range(self.count)]
        self.kept_inside = [0] * self.count
        kept = [{owner[d] for d in self._named_by_wait(t)} for t in range(self.count)]
        inside = {i for i, tasks in holders.items() if len(tasks) == 1}
        for t, values in enumerate(kept):
            self.kept_inside[t] = sum(nodes[i].bytes for i in values & inside)
        for i, tasks in holders.items():
            if i in inside:
                continue
            for t in tasks:
                self.uses[t].append(len(self.value_bytes))
                if i in kept[t]:
                    self.kept[t].append(len(self.value_bytes))
            self.value_bytes.append(nodes[i].bytes)
            self.value_users.append(len(tasks))
            self.alloc[task_of[i]] += nodes[i].bytes
        dying: list[set[int]] = [set() for _ in range(self.count)]
        for i, tasks in holders.items():
            # Held by at most two tasks, it dies inside the second wherever that runs. With three or
            # more the last to run is not known yet; ``LiveMemory`` counts those down.
            if len(tasks) <= 2:
                dying[next(reversed(tasks))].add(i)
        self.transient = [
            self._transient(self.nodes_of(t), owner, dying[t]) for t in range(self.count)
        ]

    def _named_by_wait(self, t: int) -> set[int]:
        """Return the nodes that the launch of a task reads and its wait names."""
        nodes, launch = self.problem.nodes, self.launch[t]
        waits = [i for i in self.behind[t] if nodes[i].launch == launch]
        return (
            set(nodes[launch].deps).intersection(*(nodes[i].deps for i in waits))
            if waits
            else set()
        )

    def _transient(self, run: list[int], owner: Sequence[int], dying: set[int]) -> int:
        """Most bytes of a task above what was live before it; it frees ``dying`` as it goes."""
        nodes = self.problem.nodes
        last: dict[int, int] = {}
        for p, i in enumerate(run):
            for v in (owner[i], *(owner[d] for d in nodes[i].deps)):
                last[v] = p
        freed = [0] * len(run)
        for v in dying:
            freed[last[v]] += nodes[v].bytes
        live = peak = 0
        for p, i in enumerate(run):
            if owner[i] == i and nodes[i].kind not in ("input", "output"):
                live += nodes[i].bytes
            peak = max(peak, live)
            live -= freed[p]
        return peak


def _split(problem: Problem, members: list[int]) -> tuple[list[int], int, list[int]]:
    """Return a task's members that run before its launch, the launch, and those after it."""
    launch = next((i for i in members if problem.nodes[i].kind == "launch"), -1)
    if launch < 0:
        return members, -1, []
    return [i for i in members if i < launch], launch, [i for i in members if i > launch]


def _last(problem: Problem, parts: tuple[list[int], int, list[int]]) -> int:
    """Return the place of a task in the program: its launch, or its last node that is no view."""
    before, launch, _ = parts
    if launch >= 0:
        return launch
    real = [i for i in before if not costs_nothing(problem, i)]
    return real[-1] if real else before[0]
