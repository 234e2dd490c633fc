"""Functions with several collectives: launches in one order on all ranks, and compute of any length
between.

What travels never has the size of a batch, unless the ranks of the group have batches of one
length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from fuzzing.unlike.program import WIDTH, Function, Weight

W = WIDTH


@dataclass
class Block:
    """A function as it grows. ``pending``: lines that use what was launched, still to be
    written.
    """

    choose: Random
    name: str
    groups: Mapping[str, int]
    train: bool
    lines: list[str] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    pending: list[list[str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    count: int = 0

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def weight(self, *shape: int, same: bool = False) -> str:
        dtype = "float32" if self.choose.random() < 0.7 else "float64"
        weight = Weight(self.fresh("w"), shape, dtype, same)
        self.weights.append(weight)
        return weight.name

    def group(self) -> tuple[str, int]:
        name = self.choose.choice(sorted(self.groups))
        return name, self.groups[name]

    def compute(self) -> None:
        """Work that hides something, more of it on the rank with the longer batch."""
        same = self.weight(W, W, same=True)
        self.lines.append(
            self.choose.choice(
                (
                    f"y = torch.relu(y @ {same}.to(y))",
                    f"y = torch.tanh(y @ {same}.to(y) @ {same}.to(y))",
                    f"y = y + torch.sin(x).sum(1, keepdim=True) * {same}.to(y)[0]",
                )
            )
        )

    def use(self, value: str, kind: str, before: tuple[str, ...] = ()) -> None:
        """Have ``value`` used at some later line: a ``matrix``, a ``row``, or what is only
        returned.
        """
        text = {
            "matrix": f"y = torch.tanh(y @ {value}.to(y)) * 0.5",
            "row": f"y = y + {value}.to(y) * 0.1",
            "rows": f"y = torch.tanh({value}).to(y)",
        }.get(kind)
        keep = text is None or self.choose.random() < 0.4
        self.pending.append([*before, *([text] if text else [])])
        if keep and kind != "rows":
            self.outputs.append(value)

    def use_some(self, all_: bool = False) -> None:
        while self.pending and (all_ or self.choose.random() < 0.4):
            self.lines += self.pending.pop(self.choose.randrange(len(self.pending)))


def _gather(block: Block) -> None:
    (group, size), value = block.group(), block.fresh("a")
    shard = block.weight(W // size, W)
    style = block.choose.choice(("functional", "c10d", "dtensor"))
    if block.train or style == "dtensor":
        local = f"DTensor.from_local({shard}, {group}M, [Shard(0)], run_check=False)"
        block.lines.append(
            f"{value} = {local}.redistribute(placements=[Replicate()]).to_local() * 1.0"
        )
        block.use(value, "matrix")
    elif style == "functional":
        block.lines.append(f"{value} = fc.all_gather_tensor({shard} * 1.5, 0, {group})")
        block.use(value, "matrix")
    else:
        work = block.fresh("h")
        block.lines.append(f"{value} = {shard}.new_empty(({W}, {W}))")
        call = f"dist.all_gather_into_tensor({value}, {shard}, group={group}, async_op=True)"
        block.lines.append(f"{work} = {call}")
        block.use(value, "matrix", (f"{work}.wait()",))


def _reduced(block: Block, group: str, given: str, kind: str) -> None:
    value = block.fresh("r")
    style = block.choose.choice(("functional", "c10d", "async", "dtensor"))
    if block.train or style == "dtensor":
        local = f"DTensor.from_local({given}, {group}M, [Partial()], run_check=False)"
        block.lines.append(
            f"{value} = {local}.redistribute(placements=[Replicate()]).to_local() * 1.0"
        )
        block.use(value, kind)
    elif style == "functional":
        block.lines.append(f"{value} = fc.all_reduce({given}, 'sum', {group})")
        block.use(value, kind)
    elif style == "c10d":
        block.lines += [f"{value} = {given}", f"dist.all_reduce({value}, group={group})"]
        block.use(value, kind)
    else:
        work = block.fresh("h")
        block.lines += [
            f"{value} = {given}",
            f"{work} = dist.all_reduce({value}, group={group}, async_op=True)",
        ]
        block.use(value, kind, (f"{work}.wait()",))


def _reduce_weight(block: Block) -> None:
    _reduced(block, block.group()[0], f"{block.weight(W, W)} * 0.25", "matrix")


def _statistics(block: Block) -> None:
    """Small sums over the batch: what ``merge_tiny`` and buckets are for."""
    group = block.group()[0]
    for _ in range(block.choose.randint(1, 3)):
        given = block.choose.choice(("y.mean(0)", "torch.cos(y).mean(0)", "(y * y).mean(0) * 0.1"))
        _reduced(block, group, given, block.choose.choice(("row", "returned")))


def _product(block: Block) -> None:
    _reduced(block, block.group()[0], "torch.tanh(y.t() @ y) * 0.1", "matrix")


def _scatter(block: Block) -> None:
    group, value = block.group()[0], block.fresh("s")
    whole = block.weight(W, W)
    if block.train:
        local = f"DTensor.from_local({whole}, {group}M, [Partial()], run_check=False)"
        block.lines.append(
            f"{value} = {local}.redistribute(placements=[Shard(0)]).to_local() * 1.0"
        )
    else:
        block.lines.append(f"{value} = fc.reduce_scatter_tensor({whole}, 'sum', 0, {group})")
    block.use(f"{value}.mean(0)", "row")


def _broadcast(block: Block) -> None:
    value, group = block.fresh("b"), "WORLD"
    if block.train:
        return _reduce_weight(block)
    block.lines += [
        f"{value} = {block.weight(W, W)} * 2",
        f"dist.broadcast({value}, 0, group={group})",
    ]
    return block.use(value, "matrix")


def _exchange(block: Block) -> None:
    if block.train:
        return _gather(block)
    value, group = block.fresh("e"), block.group()[0]
    block.lines.append(
        f"{value} = fc.all_to_all_single({block.weight(W, W)}, None, None, {group}) * 1.0"
    )
    return block.use(value, "matrix")


def _slice(block: Block) -> None:
    """A rank's own rows of what all have: no launch, but the coordinate is in the graph."""
    value, group = block.fresh("c"), block.group()[0]
    whole = block.weight(W, W, same=True)
    local = f"DTensor.from_local({whole}, {group}M, [Replicate()], run_check=False)"
    block.lines.append(f"{value} = {local}.redistribute(placements=[Shard(0)]).to_local() * 1.0")
    block.use(f"{value}.mean(0)", "row")


def _activations(block: Block) -> None:
    """A sum of whole batches; for groups whose ranks have batches of one length."""
    _reduced(block, "TP", "y * 0.5", "rows")


_ITEMS: dict[Callable[[Block], None], int] = {
    _gather: 6,
    _reduce_weight: 3,
    _statistics: 4,
    _product: 3,
    _scatter: 2,
    _broadcast: 1,
    _exchange: 1,
}


def draw_block(
    choose: Random, name: str, groups: Mapping[str, int], mute: str, agreeing: bool
) -> tuple[Function, str]:
    """A function and its source. ``mute``: the condition of its break, or "" for none."""
    block = Block(choose, name, groups, train=choose.random() < 0.25)
    items = choose.choices(list(_ITEMS), list(_ITEMS.values()), k=choose.randint(3, 4))
    if choose.random() < 0.2:
        items.insert(choose.randrange(len(items)), _slice)
    if agreeing and choose.random() < 0.5:
        items.insert(choose.randrange(len(items)), _activations)
    at = choose.randrange(1, len(items))
    for number, item in enumerate(items):
        if mute and number == at:
            block.lines += draw_break(choose, mute)
        item(block)
        if choose.random() < 0.6:
            block.compute()
        block.use_some()
    block.use_some(all_=True)
    block.compute()
    arguments = "".join(f"{weight.name}, " for weight in block.weights)
    text = [f"def {name}(x, {arguments}loud=False):", "    y = x * 1.0"]
    text += [f"    {line}" for line in block.lines]
    text.append(f"    return y, {''.join(f'{output}, ' for output in block.outputs)}")
    return Function(name, tuple(block.weights), block.train), "\n".join(text) + "\n"


def draw_break(choose: Random, mute: str) -> list[str]:
    """Lines at which Dynamo ends a graph where ``mute`` holds; in a loop, it leaves the whole
    function to Python.
    """
    lines = [f"if {mute}:", f"    {draw_noise(choose)}"]
    if choose.random() < 0.3:
        lines = ["for _ in range(2):", *(f"    {line}" for line in lines)]
    return lines


def draw_noise(choose: Random) -> str:
    """A statement at which Dynamo ends a graph."""
    return choose.choice(
        ("print('here')", "log.info('mean %s', y.mean().item())", "print(float(y.sum()))")
    )
