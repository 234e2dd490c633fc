"""A job in miniature: ranks that compile and launch, a store, and a scheduler that may interleave
them in any way.

The ranks run the shipped protocol (``inductor_passes.ranks``). Everything around it is modelled:
codes with launches and dependencies, graphs cut by breaks on some ranks, plans that depend on what
a rank holds, groups whose launches match by order. A store operation, a launch and a wait are a
step each; the scheduler chooses who takes the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from dataclasses import dataclass, field

from inductor_passes.errors import RanksDifferError
from inductor_passes.ranks import decision as deciding
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    CollectiveTrace,
    Group,
    Launch,
    LaunchPlan,
    Planned,
)
from inductor_passes.ranks.coordination import Await, ReadAll, Swap, Write
from inductor_passes.ranks.decided_traces import DecidedTraces


@dataclass(frozen=True)
class Code:
    """A function of the program, the same on all ranks.

    ``launches``: (what, role) in program order. ``needs``: (later, earlier) pairs of launches of
    which the later cannot go first. ``backward``: launches of its backward graph, if it trains.
    ``inner``: a function that it calls, whose launches are those from ``at`` on.
    """

    name: str
    launches: tuple
    needs: tuple = ()
    backward: tuple = ()
    inner: Code | None = None
    at: int = 0

    @property
    def behind(self):
        """The number of its first launch after the call."""
        return self.at + (len(self.inner.launches) if self.inner else 0)

    def site(self, launch):
        """Where the program has a launch: the code, and the number there."""
        if self.inner and self.at <= launch < self.behind:
            return self.inner, launch - self.at
        return self, launch


def root_of(code):
    return f"{code.name} (program.py:1-99)"


def line_of(code, launch, backward=False):
    return f"{code.name}:{launch + (50 if backward else 10)}"


@dataclass(frozen=True)
class Call:
    """One call of a code on one rank.

    ``cuts``: where graph breaks part it on this rank, by launch number. ``holds``: what this rank
    holds: another number is another graph of the same code, with another plan of its own.
    ``launches``: instead of the code's, on a rank whose program does not match; None for one that
    it has not. ``stiff``: its graph can launch in the program's order alone. ``python``: a break in
    a loop leaves it to Python; what of it calls functions that are compiled by themselves then is
    ``inner``. ``eager``: it is not compiled on this rank at all. ``apart``: a break at the call of
    its code's ``inner`` runs that by itself. ``within``: how it then calls it. ``callers``: lines
    that are on the stack; None where nobody looked.
    """

    code: Code
    cuts: tuple = ()
    holds: int = 0
    launches: tuple | None = None
    stiff: bool = False
    python: bool = False
    inner: tuple = ()
    awaits: bool = True  # Python waits for its launches before the next call
    eager: bool = False
    apart: bool = False
    within: Call | None = None
    callers: tuple | None = None

    def of_inner(self):
        """The call of its code's inner function, by itself."""
        callers = (line_of(self.code, self.code.at), *(self.callers or ()))
        return dataclasses.replace(self.within or Call(self.code.inner), callers=callers)


@dataclass
class Job:
    """``groups[role]``: the groups, as tuples of ranks, that launches of this role go to.
    ``steps[rank]``: its calls.
    """

    ranks: int
    groups: tuple
    steps: tuple
    resets: tuple = ()  # ranks that forget their compiled graphs before their last call


@dataclass
class Store:
    values: dict = field(default_factory=dict)

    def do(self, op):
        if isinstance(op, Swap):
            held = self.values.get(op.key, "")
            if held == op.old:
                self.values[op.key] = held = op.new
            return held
        if isinstance(op, Write):
            self.values.update(op.values)
            return None
        if isinstance(op, ReadAll):
            found = [self.values.get(key) for key in op.keys]
            return None if None in found else found
        raise AssertionError(op)


def interleaved(steps, rng):
    """Run steps of ranks, by rank, on one store, in an order that ``rng`` draws; what each returns.

    Time may be up for any rank that waits, at any moment: clocks differ.
    """
    store, found = Store(), {}
    ready, waiting = dict.fromkeys(steps), {}
    while ready or waiting:
        for rank, key in list(waiting.items()):
            if key in store.values:
                ready[rank] = True
                del waiting[rank]
        if waiting and (not ready or rng.random() < 0.05):
            rank = rng.choice(sorted(waiting))
            ready[rank] = False
            del waiting[rank]
        rank = rng.choice(sorted(ready))
        try:
            operation = steps[rank].send(ready.pop(rank))
        except StopIteration as stop:
            found[rank] = stop.value
            continue
        if isinstance(operation, Await):
            waiting[rank] = operation.key
        else:
            ready[rank] = store.do(operation)
    return found


class Wrong(AssertionError):
    pass


@dataclass
class Result:
    errors: dict
    timeouts: int
    reordered: int
    decisions: list
    operations: int


class Offer:
    """What a rank's graph would launch alone, which depends on what the rank holds, and what it
    can.
    """

    def __init__(self, trace, needs, holds, stiff):
        self.trace, self.needs, self.holds, self.stiff = trace, needs, holds, stiff

    def plan(self):
        count = len(self.trace.launches)
        rng = random.Random(f"{self.trace.key} {self.holds}")
        tries = [self._shuffled(rng) for _ in range(3)] + [[[i] for i in range(count)]]
        plan = next(p for p in tries if self._fits(p))
        return LaunchPlan(
            tuple(Planned(tuple(m), self.trace.launches[m[0]].what) for m in plan)
        ).text_for(self.trace)

    def _shuffled(self, rng):
        order = list(range(len(self.trace.launches)))
        rng.shuffle(order)
        plan = []
        for i in order:
            last = plan[-1][0] if plan else None
            launch = self.trace.launches[i]
            if last is not None and rng.random() < 0.5:
                other = self.trace.launches[last]
                if (other.what, other.group) == (launch.what, launch.group):
                    plan[-1].append(i)
                    continue
            plan.append([i])
        return plan

    def _fits(self, plan):
        place = {i: p for p, members in enumerate(plan) for i in members}
        if self.stiff:
            return plan == [[i] for i in range(len(self.trace.launches))]
        return all(place[a] > place[b] for a, b in self.needs)

    def can_really_follow(self, text):
        return text == PROGRAM or self._fits(
            [list(p.members) for p in LaunchPlan.of(text).launches]
        )

    def can_follow(self, text):
        return text == PROGRAM or self._fits(
            [list(p.members) for p in LaunchPlan.of(text).launches]
        )


class Rank:
    def __init__(self, number, job, model):
        self.number, self.job, self.model = number, job, model
        self.decided = DecidedTraces()
        self.compiled = {}
        self.around = [
            Group(f"role{role}", group)
            for role, groups in enumerate(job.groups)
            for group in groups
            if number in group and len(group) > 1
        ]

    def run(self):
        calls = self.job.steps[self.number]
        for index, call in enumerate(calls):
            if self.number in self.job.resets and index == len(calls) - 1:
                self.compiled = {}
            launches = call.code.launches if call.launches is None else call.launches
            yield from self._pass(call, launches, call.code.backward, index)

    def _pass(self, call, launches, backward, index):
        if call.python or call.eager:
            yield from self._in_python(call, launches, backward)
            return
        if call.apart:
            yield from self._around_inner(call, launches)
            return
        ends = [*call.cuts, len(launches)]
        pieces = list(itertools.pairwise([0, *ends]))
        behind = []
        for number, (start, end) in enumerate(pieces):
            partial = len(pieces) > 1
            frame = (call.code.name, start, end, call.holds, call.stiff, launches)
            # A frame's backward graph is compiled with its forward one.
            owns = range(len(backward)) if not partial else self._share(number, pieces, backward)
            forward_plan = yield from self._graph(
                call, frame, launches, range(start, end), partial, False
            )
            backward_plan = yield from self._graph(call, frame, backward, owns, partial, True)
            self.compiled.setdefault(frame, self.model.epoch(self.number))
            behind.append((owns, backward_plan))
            yield from self._launch(call, launches, range(start, end), forward_plan)
        for owns, plan in reversed(behind):
            yield from self._launch(call, backward, owns, plan)

    def _around_inner(self, call, launches):
        code = call.code
        for start, end in ((0, code.at), (code.behind, len(launches))):
            chosen = range(start, end)
            frame = (code.name, start, end, call.holds, call.stiff, launches)
            plan = yield from self._graph(call, frame, launches, chosen, True, False)
            yield from self._started(self._launch(call, launches, chosen, plan), call.awaits)
            if start == 0:
                yield from self._started(self._inner(call), call.awaits)
        yield from self._awaited(launches)

    def _inner(self, call):
        within = call.of_inner()
        yield from self._pass(within, within.code.launches, (), 0)

    @staticmethod
    def _started(steps, awaits=False):
        """The steps; what is launched is not waited for, but for ``awaits``."""
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if not awaits and isinstance(step, tuple) and step[0] == "launch":
                step = ("start", *step[1:])
            answer = yield step

    def _awaited(self, launches):
        for group in dict.fromkeys((role, self._group(role)) for _, role in launches):
            if group[1] is not None:
                yield ("wait", group, None)

    def _in_python(self, call, launches, backward):
        if not call.eager:
            root, callers = root_of(call.code), call.callers or ()
            steps = self.model.leave(self.number, root, callers, self.decided, self.around)
            if (yield from steps):
                self.model.bump(self.number)
        for i, (what, role) in enumerate(launches):
            if call.code.inner and call.code.at <= i < call.code.behind:
                if i == call.code.at:
                    yield from self._started(self._inner(call))
                continue
            # Of whatever function it is called, it has the lines of what is compiled, and no
            # others.
            if i in call.inner and (group := self._group(role)) is not None:
                own, name = (Launch(what, 0, (f"{what}:1",)),), Group(f"role{role}", group)
                callers = frozenset((line_of(call.code, i),))
                root = f"{what} (library.py:1-1)"
                trace = CollectiveTrace((name,), own, root=root, graph=what, callers=callers)
                yield from self._settled((what, role), trace, Offer(trace, (), 0, False))
            # Python may wait for what it launches much later.
            yield from self._started(self._launch(call, launches, [i], PROGRAM))
        if call.awaits:
            yield from self._awaited(launches)
        yield from self._launch(call, backward, range(len(backward)), PROGRAM)

    def _group(self, role):
        group = next((g for g in self.job.groups[role] if self.number in g), ())
        return group if len(group) > 1 else None

    @staticmethod
    def _share(number, pieces, backward):
        """Backward launches of one piece: the last piece has the first ones."""
        size = len(backward)
        cuts = [size * i // len(pieces) for i in range(len(pieces) + 1)]
        back = len(pieces) - 1 - number
        return range(cuts[back], cuts[back + 1])

    def _trace(self, call, launches, chosen, partial, backward):
        groups, numbers, found = [], {}, []
        for i in chosen:
            if launches[i] is None:
                continue
            what, role = launches[i]
            if (group := self._group(role)) is None:
                continue
            if role not in numbers:
                numbers[role] = len(groups)
                groups.append(Group(f"role{role}", group))
            code, number = call.code.site(i)
            path = (line_of(code, number, backward), f"{what}:1")
            if code is not call.code:
                path = (line_of(call.code, call.code.at), *path)
            # Rows of a mesh have batches of their own.
            size = 64 + 1000 * self.job.groups[role].index(group)
            found.append((i, Launch(what, numbers[role], path, size)))
        trace = CollectiveTrace(
            tuple(groups),
            tuple(launch for _, launch in found),
            backward,
            partial,
            root_of(call.code),
            call.code.name,
            callers=None if call.callers is None else frozenset(call.callers),
        )
        return trace, [i for i, _ in found]

    def _graph(self, call, frame, launches, chosen, partial, backward):
        trace, numbers = self._trace(call, launches, chosen, partial, backward)
        if not trace.launches:
            return PROGRAM
        needs = () if backward else call.code.needs
        local = {i: k for k, i in enumerate(numbers)}
        inside = [(local[a], local[b]) for a, b in needs if a in local and b in local]
        offer = Offer(trace, inside, call.holds, call.stiff)
        return (yield from self._settled((*frame, backward, tuple(chosen)), trace, offer))

    def _settled(self, key, trace, offer):
        if key in self.compiled and self.compiled[key][0] == self.model.epoch(self.number):
            return self.compiled[key][1]
        decision = yield from self.model.decide(self, trace, offer)
        if not offer.can_really_follow(decision.plan):
            raise Wrong(f"rank {self.number} cannot launch as {decision.plan}")
        if decision.given_up:
            self.model.bump(self.number)
        self.model.decisions.append((self.number, trace.root, decision))
        self.compiled[key] = (self.model.epoch(self.number), decision.plan)
        return decision.plan

    def _launch(self, call, launches, chosen, text):
        real = [
            i for i in chosen if launches[i] is not None and self._group(launches[i][1]) is not None
        ]
        if text == PROGRAM:
            plan = [[i] for i in range(len(real))]
        else:
            plan = [list(p.members) for p in LaunchPlan.of(text).launches]
            if plan != [[i] for i in range(len(real))]:
                self.model.reordered += 1
        for members in plan:
            what, role = launches[real[members[0]]]
            group = next(g for g in self.job.groups[role] if self.number in g)
            sites = (call.code.site(real[m]) for m in members)
            places = tuple((code.name.rstrip("'"), number) for code, number in sites)
            yield ("launch", (role, group), (what, places))


def shipped(rank, trace, offer):
    return deciding.decide(rank.number, trace, offer, rank.decided, rank.around)


class Model:
    """Runs a job under one interleaving, chosen by ``choose(options)``."""

    def __init__(self, job, decide=shipped):
        self.job, self.decide, self.leave = job, decide, deciding.leave_to_python
        self.decisions, self.reordered, self.operations = [], 0, 0
        self.stuck = []
        self._epoch = dict.fromkeys(range(job.ranks), 0)

    def epoch(self, rank):
        return self._epoch[rank]

    def bump(self, rank):
        self._epoch[rank] += 1

    def run(self, choose):
        store = Store()
        ranks = [Rank(r, self.job, self) for r in range(self.job.ranks)]
        steps = [rank.run() for rank in ranks]
        waiting = {}  # rank -> what it waits for
        ready = dict.fromkeys(range(self.job.ranks))  # rank -> the answer to its last step
        launched = {}  # (group, rank) -> launches so far
        errors, timeouts = {}, 0
        while ready or waiting:
            for r, step in list(waiting.items()):
                if self._is_over(step, r, store, launched):
                    del waiting[r]
                    ready[r] = True
            if not ready:
                late = [r for r, step in waiting.items() if isinstance(step, Await)]
                if not late:
                    if errors:
                        break  # a peer raised: the others' launches fail
                    raise Wrong(f"deadlock: {waiting}")
                timeouts += 1
                self.stuck.append(dict(waiting))
                for r in late:  # clocks differ, but all have waited as long as they may
                    del waiting[r]
                    ready[r] = False
                continue
            r = choose(sorted(ready))
            answer = ready.pop(r)
            try:
                step = steps[r].send(answer)
            except StopIteration:
                continue
            except RanksDifferError as error:
                errors[r] = error
                continue
            if isinstance(step, tuple):
                kind, group, what = step
                own = launched.setdefault((group, r), [])
                if what is not None:
                    own.append(what)
                    self._check(group, launched)
                if kind == "start":
                    ready[r] = True
                else:
                    waiting[r] = (*step, len(own))
            elif isinstance(step, Await):
                self.operations += 1
                waiting[r] = step
            else:
                self.operations += 1
                ready[r] = store.do(step)
        return Result(errors, timeouts, self.reordered, self.decisions, self.operations)

    @staticmethod
    def _is_over(step, rank, store, launched):
        if isinstance(step, Await):
            return step.key in store.values
        _, group, _, count = step
        return all(len(launched.get((group, r), ())) >= count for r in group[1])

    @staticmethod
    def _check(group, launched):
        sequences = [launched.get((group, r), []) for r in group[1]]
        for at in itertools.zip_longest(*sequences):
            seen = {what for what in at if what is not None}
            if len(seen) > 1:
                raise Wrong(f"other bits on {group}: {sorted(map(str, seen))}")


def draw(rng, *, lonely=False):
    """A job whose ranks match in eager mode. ``lonely``: a rank alone may meet a break after the
    job has run.
    """
    ranks = rng.choice((2, 2, 3, 4))
    everyone = tuple(range(ranks))
    roles = [(everyone,)]
    if ranks == 4 and rng.random() < 0.5:
        roles = [((0, 1), (2, 3)), ((0, 2), (1, 3))] + roles * rng.choice((0, 1))
    elif ranks > 2 and rng.random() < 0.3:
        roles.append(((0, 1),))
    # A rank outside of a group that others use has another trace for the whole function, which may
    # be that of a part for them: then a plan settled for the part is not given up in time, and an
    # error says so.
    alike = all(sum(map(len, groups)) == ranks for groups in roles)
    codes = []
    for name in "fgh"[: rng.choice((1, 1, 2, 3))]:
        count = rng.choice((1, 2, 2, 3, 4))
        launches = tuple(
            (rng.choice(("all_gather f32", "all_reduce sum f32")), rng.randrange(len(roles)))
            for _ in range(count)
        )
        needs = tuple(
            (a, b) for b, a in itertools.combinations(range(count), 2) if rng.random() < 0.2
        )
        backward = tuple(
            ("reduce_scatter sum f32", rng.randrange(len(roles)))
            for _ in range(rng.choice((0, 0, 1, 2, 3)))
        )
        codes.append(Code(name, launches, needs, backward))

    def cuts(code):
        count = len(code.launches)
        return tuple(sorted(rng.sample(range(count + 1), rng.choice((1, 1, 2)) if count else 1)))

    # Ranks may launch the same at two places of the program, say by the length of their batch:
    # where no graph break comes in, and all ranks have been at both.
    twins = rng.random() < 0.2
    alone = rng.choice(((), ("all_gather f32",), ("all_gather f32", "all_reduce sum f32")))
    calls = {r: [] for r in everyone}
    seen = set()
    for _ in range(rng.choice((1, 2, 3, 4))):
        for code in codes:
            if rng.random() < 0.2:
                continue
            other = dataclasses.replace(code, name=f"{code.name}'")
            if twins and code.name in seen and other.name not in seen and not lonely:
                code = other
            first = code.name not in seen
            seen.add(code.name)
            mode = rng.choice(("same", "same", "own break", "uniform break" if alike else "same"))
            python = rng.random() < 0.3
            # What compiles by itself does so on whichever rank it is called from Python.
            inner = tuple(
                i for i in range(len(code.launches)) if python and code.launches[i][0] in alone
            )
            together = cuts(code) if mode == "uniform break" and not twins else ()
            for r in everyone:
                mine = together
                apart = mode == "own break" and (first or lonely) and rng.random() < 0.5
                if apart and not twins:
                    mine = cuts(code)
                mixed = twins and not first and (lonely or other.name in seen)
                stiff = (first or lonely) and not twins and rng.random() < 0.05
                chosen = other if mixed and rng.random() < 0.3 else code
                holds, left = rng.choice((0, 0, 1, 2)), False
                if python and mode in ("own break", "uniform break") and not twins:
                    left, mine = mine != (), ()
                calls[r].append(Call(chosen, mine, holds, stiff=stiff, python=left, inner=inner))
    resets = tuple(r for r in everyone if rng.random() < 0.1)
    return Job(ranks, tuple(roles), tuple(tuple(calls[r]) for r in everyone), resets)


WAYS = ("cut", "python", "apart", "eager")


def draw_inlined(rng, *, parting=None):
    """A job that calls a function from an evaluation in Python, and has it inlined in a step that
    is compiled whole, in any order. All ranks run it alike, with a length of their own.

    ``parting``: one rank alone parts from the step, from a call on that is drawn: it meets a break
    ("cut"), or one at the call of the function ("apart"); it leaves the step to Python ("python"),
    or has never compiled it ("eager").
    """
    ranks = rng.choice((2, 2, 3, 4))
    everyone = tuple(range(ranks))
    roles = [(everyone,)]
    if ranks == 4 and rng.random() < 0.5:
        roles = [((0, 1), (2, 3)), ((0, 2), (1, 3))]

    def some(*counts):
        kinds = ("all_gather f32", "all_reduce sum f32")
        count = rng.choice(counts)
        return tuple((rng.choice(kinds), rng.randrange(len(roles))) for _ in range(count))

    inner = Code("m", some(2, 2, 3), ((1, 0),) if rng.random() < 0.2 else ())
    before, after = some(0, 0, 1, 2), some(0, 1, 2)
    at, launches = len(before), (*before, *inner.launches, *after)
    needs = tuple((a + at, b + at) for a, b in inner.needs)
    # A step that nobody can reorder keeps the program's order, which ranks have agreed on.
    count = len(launches)
    fixed = tuple((i + 1, i) for i in range(count - 1)) if rng.random() < 0.4 else ()
    outer = Code("s", launches, (*needs, *fixed), inner=inner, at=at)

    def holds():
        return rng.choice((0, 0, 0, 1, 2))

    def step(way):
        cuts = (rng.randrange(count + 1),) if way == "cut" else ()
        within = Call(inner, holds=holds())
        if way == "apart":
            # What Dynamo does not inline there is not what it has compiled for an evaluation.
            ends = ((), (), (len(inner.launches),))
            within = Call(inner, rng.choice(ends), within.holds + 10)
        return Call(
            outer,
            cuts,
            holds(),
            python=way == "python",
            awaits=way != "apart" or rng.random() < 0.5,
            eager=way == "eager",
            apart=way == "apart",
            within=within,
            callers=("main:1",),
        )

    calls = {r: [] for r in everyone}
    alone, left = rng.choice(everyone), False
    number = rng.choice((2, 3, 4, 5))
    first = 0 if parting == "eager" else rng.randrange(number)
    for index in range(number):
        evaluates = rng.random() < 0.45
        together = rng.choice(("whole", "whole", "whole", "cut", "python", "apart"))
        if parting is not None:
            together = "whole" if index >= first or rng.random() < 0.7 else together
        if left or (together == "python" and not evaluates):
            together, left = "python", True  # for as long as the job lasts
        state = rng.getstate()
        # Another function of the step's name may evaluate.
        lines = ("evaluate:1", *rng.choice(((), (), ("s:500",))), "main:2")
        for r in everyone:
            own = r == alone and parting is not None and index >= first
            if together != "whole":
                rng.setstate(state)
            if evaluates:
                calls[r].append(Call(inner, holds=holds(), callers=lines))
            else:
                calls[r].append(step(parting if own else together))
    return Job(ranks, tuple(roles), tuple(tuple(calls[r]) for r in everyone))


def explore(job, seed, decide=shipped):
    """Run one interleaving; returns the result, raises Wrong for what must never be."""
    rng = random.Random(seed)
    return Model(job, decide).run(rng.choice)


def describe(job):
    return json.dumps(dataclasses.asdict(job), indent=1)
