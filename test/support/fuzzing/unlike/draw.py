"""A program from its number."""

from __future__ import annotations

from random import Random

from fuzzing.unlike.blocks import draw_block
from fuzzing.unlike.models import Model, draw_model
from fuzzing.unlike.program import HOW, Event, Function, Program

_METRICS = """\
def metrics(x, loud=False):
    return torch.relu(x * 2).mean(), x.std()
def noted(x, loud=False):
    y = torch.cos(x) * 3
    if dist.get_rank() == 0:
        log.info("noted")
    return (y.sin().mean(),)
"""
_LONGEST = 7  # graphs of one function before Dynamo gives it up: see "many lengths"


def draw(seed: int, meshes: tuple[tuple[int, ...], ...]) -> Program:
    """The program of this number on one of ``meshes``."""
    return _Draw(seed, meshes).program()


class _Draw:
    def __init__(self, seed: int, meshes: tuple[tuple[int, ...], ...]) -> None:
        self.seed, self.choose = seed, Random(seed)
        self.mesh = self.choose.choice(meshes)
        self.ranks = self.mesh[0] * (self.mesh[1] if len(self.mesh) > 1 else 1)
        self.two_dims = len(self.mesh) > 1
        self.steps = self.choose.randint(6, 8)
        self.notes: list[str] = []
        self.one = self.choose.randrange(self.ranks)  # the rank that is unlike the others
        self.agreeing = self.two_dims and self.choose.random() < 0.5

    def program(self) -> Program:
        choose = self.choose
        self.accumulate = choose.choice((1, 1, 2, 3))
        self.model: Model | None = None
        self.traits: dict[str, tuple[frozenset[int], tuple[int, ...]]] = {}
        has_model = choose.random() < 0.6
        condition = self._breaks()
        if has_model:
            self.model = draw_model(choose, self.two_dims, condition)
            source, layout = self.model.source, self.model.layout
            self.notes.append(f"model {layout}")
            self.agreeing |= self.two_dims and layout.startswith(("tensor", "both"))
            if self.model.wrapper:
                self._traits(self.model)
            functions: tuple[Function, ...] = ()
        else:
            groups = {"WORLD": self.ranks, "ALT": self.ranks, "DP": self.mesh[0]}
            if self.two_dims:
                groups["TP"] = self.mesh[1]
            chosen = dict(choose.sample(sorted(groups.items()), choose.randint(1, len(groups))))
            if choose.random() < 0.4:
                chosen = dict([choose.choice(sorted(groups.items()))])
            self.notes.append(f"{len(chosen)} groups")
            drawn = [
                draw_block(
                    choose, f"block{at}", chosen, condition if at == 0 else "", self.agreeing
                )
                # Where ranks cut the first one differently, only the second may be reordered.
                for at in range(choose.choice((1, 2, 2) if condition else (1, 1, 1, 2)))
            ]
            functions = tuple(function for function, _ in drawn)
            source = "\n".join(text for _, text in drawn)
        self._lengths()
        if self.agreeing:
            self.notes.append("agreeing")
        aside = [Function("metrics"), Function("noted")]
        dynamic = [choose.choice((None, None, True, False)) for _ in range(self.ranks)]
        if choose.random() < 0.5:
            dynamic = [dynamic[0]] * self.ranks
        events = self._events(functions)
        warm = None
        if choose.random() < 0.25:
            warm = tuple(rank for rank in range(self.ranks) if choose.random() < 0.7)
            self.notes.append("second job")
        return Program(
            self.seed,
            self.mesh,
            f"{_METRICS}\n{source}",
            (*functions, *aside),
            events,
            tuple(dynamic),
            choose.choice(("own", "shared")),
            warm,
            self.one if choose.random() < 0.25 else None,
            # What is left to Python is known to others by its file's name as well.
            choose.random() < 0.3 and "for _ in" not in source,
            choose.choice(({}, {}, {"topology": "cpu-gloo"}, {"topology": "h100x8"})),
            tuple(self.notes),
        )

    def _breaks(self) -> str:
        """The condition in the source; who is loud in which step stands in ``self.loud``."""
        kind = self.choose.choice((*("no",) * 4, "first", "rank", "later", "turns", "uniform"))
        steps, start = range(self.steps), self.choose.randrange(1, self.steps)
        every = self.choose.randint(2, 4)
        self.loud = [[False] * self.steps for _ in range(self.ranks)]
        mine = {
            "first": lambda step: True,
            "later": lambda step: step >= start,
            "turns": lambda step: step % every == 0,
        }.get(kind)
        if mine:
            self.loud[self.one] = [mine(step) for step in steps]
        if kind == "uniform":
            self.loud = [[step % every == 0 for step in steps]] * self.ranks
        self.notes.append(f"break {kind}")
        if kind == "rank":
            return f"dist.get_rank() == {self.one}"
        return "" if kind == "no" else "loud"

    def _lengths(self) -> None:
        """``self.rows[rank][step]``, and which of a few kinds of difference it has."""
        choose = self.choose
        kind = choose.choice(("equal", "buckets", "buckets", "last", "last", "far", "free"))
        some = choose.sample((4, 6, 10, 16, 24, 33, 64, 200, 1500), 3)
        self.notes.append(f"lengths {kind}")

        def length(step: int) -> int:
            if kind in ("equal", "last"):
                return some[0]
            if kind == "far":
                return choose.choice((4, 3000))
            return choose.choice(some) if kind == "buckets" else choose.randint(3, 9) * 4

        pairs = self.agreeing
        self.rows: list[list[int]] = []
        for rank in range(self.ranks):
            if pairs and rank % self.mesh[-1]:
                self.rows.append(self.rows[-1])
                continue
            rows = [length(step) for step in range(self.steps)]
            if kind == "last" and choose.random() < 0.6:
                rows[-1] = max(2, some[0] // 2 - 1)
            if kind == "last" and choose.random() < 0.3:
                rows[self.steps // 2] = max(2, some[0] // 3)
            self.rows.append(rows)
        if any(len(set(rows)) >= _LONGEST for rows in self.rows):
            self.notes.append("many lengths")

    def _traits(self, model: Model) -> None:
        """``self.traits[word]``: steps and ranks that train a wrapped model so; see ``HOW``."""
        choose = self.choose
        before_last = frozenset(s for s in range(self.steps) if not self._updates(s))
        if before_last and choose.random() < 0.6:
            self.traits["local"] = before_last, tuple(range(self.ranks))
            self.notes.append("local")
        for word, chance in (("eager", 0.25), ("autocast", 0.2), ("outside", 0.3)):
            if choose.random() < chance:
                steps = frozenset(step for step in range(self.steps) if choose.random() < 0.5)
                is_alone = word == "outside" and model.wrapper == "ddp" and choose.random() < 0.4
                ranks = (self.one,) if is_alone else tuple(range(self.ranks))
                self.traits[word] = steps, ranks
                self.notes.append(f"{word} on one rank" if is_alone else word)
        if choose.random() < 0.25:
            self.traits["hook"] = frozenset([choose.randrange(self.steps - 1)]), (self.one,)
            self.notes.append("hook")
        if model.heads:
            self.notes.append(f"heads by {model.heads}")

    def _updates(self, step: int) -> bool:
        return (step + 1) % self.accumulate == 0

    def _trained(self, model: Model, rank: int, step: int) -> list[Event]:
        """A micro-batch, and an update behind the last one."""
        words = [
            word for word, (steps, ranks) in self.traits.items() if step in steps and rank in ranks
        ]
        train = Event(
            "train",
            rows=self.rows[rank][step],
            loud=self.loud[rank][step],
            head={"": 0, "step": step % 2, "rank": (step + rank) % 2}[model.heads],
            how=tuple(word for word in words if word in HOW),
        )
        hooks = [Event("hook")] if "hook" in words else []
        return [*hooks, train, *([Event("update")] if self._updates(step) else [])]

    def _evaluated(self, model: Model, rank: int, step: int) -> list[Event]:
        """Forwards without gradients: on one rank where they launch nothing, else on all."""
        forward = Event("forward", rows=self.rows[rank][step] + 1)
        is_alone = model.wrapper == "ddp"
        # The first one behind training broadcasts DDP's buffers.
        on_all = [forward] if model.broadcasts or model.wrapper == "fsdp2" else []
        return [*on_all, *([forward] if is_alone and rank == self.one else [])]

    def _events(self, functions: tuple[Function, ...]) -> tuple[tuple[tuple[Event, ...], ...], ...]:
        choose = self.choose
        aside = choose.choice(("no", "metrics", "evaluate", "noted", "both"))
        self.notes.append(f"aside {aside}")
        reset = choose.randrange(1, self.steps) if choose.random() < 0.12 else None
        if reset is not None:
            self.notes.append("reset")
        silent = choose.random() < 0.3  # phases without gradients, on all ranks
        found = []
        for rank in range(self.ranks):
            steps = []
            for step in range(self.steps):
                rows, loud = self.rows[rank][step], self.loud[rank][step]
                events = []
                if reset == step and rank == self.one:
                    events.append(Event("reset"))
                if aside in ("metrics", "both") and rank == self.one and step in (0, 1, 4):
                    events.append(Event("call", "metrics", rows + step))
                if aside in ("noted", "both") and step < 2:
                    events.append(Event("call", "noted", rows))
                if self.model:
                    if silent and step % 3 == 1:
                        events.append(Event("forward", rows=rows, loud=loud))
                    else:
                        events += self._trained(self.model, rank, step)
                    if aside == "evaluate" and step in (0, 3):
                        events += self._evaluated(self.model, rank, step)
                else:
                    quiet = silent and step % 3 == 1
                    events += [
                        Event("quiet" if quiet else "call", each.name, rows, loud)
                        for each in functions
                    ]
                steps.append(tuple(events))
            found.append(tuple(steps))
        return tuple(found)
