"""Modules under a tensor-parallel plan, ``fully_shard`` or both: a training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from fuzzing.drawing import Draft, settings
from fuzzing.program import Input, Layer, Program

_HEAD = 2


@dataclass
class _Blocks:
    """Blocks on values [batch, width]; ``ranks`` share a tensor-parallel layer, 1 without a
    plan.
    """

    draft: Draft
    batch: int
    width: int
    ranks: int
    layers: list[Layer] = field(default_factory=list)

    def layer(self, kind: str, text: str, plan: str = "") -> str:
        name = f"{kind}{len(self.layers)}"
        self.layers.append(Layer(name, text, plan if self.ranks > 1 else ""))
        return f"self.{name}"

    def linear(self, given: int, made: int, plan: str = "") -> str:
        bias = self.draft.choose.random() < 0.6
        return self.layer("linear", f"torch.nn.Linear({given}, {made}, bias={bias})", plan)

    def value(self) -> str:
        return self.draft.like((self.batch, self.width))

    def add(self, text: str, *operands: str) -> None:
        self.draft.add(text, operands, (self.batch, self.width))

    def hidden(self) -> int:
        return self.ranks * self.draft.choose.randint(1, 4)

    def activation(self) -> str:
        return self.draft.choose.choice(("F.gelu", "torch.relu", "torch.tanh", "F.silu"))


def draw(seed: int) -> Program:
    """One to three blocks on an input that all ranks share."""
    choose = Random(seed)
    mesh = choose.choice((*((2,),) * 6, (3,), (4,), (2, 2), (1, 2)))
    tensor = choose.random() < 0.6
    width, batch = choose.choice(((8, 4), (12, 6), (8, 8), (12, 12), (6, 6)))
    draft = Draft(choose)
    draft.give(Input("x0", (batch, width), grad=choose.random() < 0.5))
    blocks = _Blocks(draft, batch, width, mesh[-1] if tensor else 1)
    for _ in range(choose.randint(1, 3)):
        choose.choice(_BLOCKS)(blocks)
    both = tensor and len(mesh) > 1
    return Program(
        "module",
        seed,
        mesh,
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(2),
        backward=True,
        layers=tuple(blocks.layers),
        is_sharded=both or not tensor,
        settings=settings(choose),
    )


def _perceptron(blocks: _Blocks) -> None:
    """Up and down again, with the input added now and then; recomputed in backward now and then."""
    value, hidden = blocks.value(), blocks.hidden()
    up = blocks.linear(blocks.width, hidden, "ColwiseParallel()")
    down = blocks.linear(hidden, blocks.width, "RowwiseParallel()")
    inner = f"{down}({blocks.activation()}({up}(x)))"
    text = blocks.draft.choose.choice(
        (
            f"(lambda x: {inner})({{0}})",
            f"(lambda x: {inner})({{0}}) + {{0}}",
            f"checkpoint(lambda x: {inner}, {{0}}, use_reentrant=False)",
        )
    )
    blocks.add(text, value)


def _attention(blocks: _Blocks) -> None:
    """Rows attend to each other, heads over ranks."""
    value, inner = blocks.value(), _HEAD * blocks.ranks * blocks.draft.choose.randint(1, 2)
    heads = [
        f"{blocks.linear(blocks.width, inner, 'ColwiseParallel()')}({{0}})"
        f".unflatten(-1, (-1, {_HEAD})).transpose(0, 1)"
        for _ in range(3)
    ]
    causal = blocks.draft.choose.random() < 0.5
    mixed = f"F.scaled_dot_product_attention({', '.join(heads)}, is_causal={causal})"
    down = blocks.linear(inner, blocks.width, "RowwiseParallel()")
    blocks.add(f"{down}({mixed}.transpose(0, 1).flatten(-2))", value)


def _norm(blocks: _Blocks) -> None:
    kind = blocks.draft.choose.choice(("LayerNorm", "RMSNorm"))
    norm = blocks.layer("norm", f"torch.nn.{kind}({blocks.width})")
    blocks.add(f"{norm}({{0}})", blocks.value())


def _running_norm(blocks: _Blocks) -> None:
    """A norm that keeps statistics in buffers."""
    norm = blocks.layer("norm", f"torch.nn.BatchNorm1d({blocks.width})")
    blocks.add(f"{norm}({{0}})", blocks.value())


def _gate(blocks: _Blocks) -> None:
    wide = blocks.linear(blocks.width, blocks.width, "ColwiseParallel(output_layouts=Replicate())")
    blocks.add(f"{wide}({{0}}) * {{0}}", blocks.value())


def _sequence(blocks: _Blocks) -> None:
    """Between two layers each rank has a share of the rows, and a norm works on that."""
    if blocks.batch % blocks.ranks:
        return _norm(blocks)
    width = blocks.width
    down = blocks.linear(
        width, width, "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))"
    )
    norm = blocks.layer(
        "norm",
        f"torch.nn.LayerNorm({width})",
        "SequenceParallel(sequence_dim=0, use_local_output=True)",
    )
    up = blocks.linear(
        width, width, "ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())"
    )
    return blocks.add(f"{up}({norm}({down}({{0}})))", blocks.value())


def _embedding(blocks: _Blocks) -> None:
    """A row of a table for each row, over columns or over entries."""
    plan = blocks.draft.choose.choice(
        (
            "ColwiseParallel(output_layouts=Replicate())",
            "RowwiseParallel(input_layouts=Replicate())",
        )
    )
    table = blocks.layer("table", f"torch.nn.Embedding(12, {blocks.width})", plan)
    blocks.add(f"{table}(({{0}}.detach().abs().sum(-1) * 3).long() % 12) + {{0}}", blocks.value())


_BLOCKS = (
    _perceptron,
    _perceptron,
    _attention,
    _norm,
    _running_norm,
    _gate,
    _sequence,
    _embedding,
)
