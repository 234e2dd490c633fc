"""Modules under a tensor-parallel plan or ``data_parallel``: a training step."""

from __future__ import annotations

from random import Random

from fuzzing.drawing import Draft, settings
from fuzzing.program import Input, Layer, Program


def draw(seed: int) -> Program:
    """Blocks of linear, norm and embedding layers on an input [batch, width] that all ranks share."""
    choose = Random(seed)
    ranks = choose.choice((2, 2, 2, 3, 4))
    plain = choose.random() < 0.4
    width = 4 * choose.choice((2, 3)) if ranks != 3 else choose.choice((6, 12))
    batch = choose.choice((4, 6, 8, 12)) if ranks != 3 else choose.choice((6, 12))
    draft, layers = Draft(choose), []
    draft.give(Input("x0", (batch, width), spread=False, grad=choose.random() < 0.5))
    shape = (batch, width)
    for at in range(choose.randint(1, 3)):
        value = draft.like(shape)
        hidden = ranks * choose.randint(1, 4) if choose.random() < 0.7 else choose.randint(3, 9)
        kind = choose.randrange(4)
        if kind < 2:
            up, down = f"up{at}", f"down{at}"
            bias = choose.random() < 0.6
            plans = ("", "") if plain else ("ColwiseParallel()", "RowwiseParallel()")
            layers.append(Layer(up, f"torch.nn.Linear({width}, {hidden}, bias={bias})", plans[0]))
            layers.append(Layer(down, f"torch.nn.Linear({hidden}, {width}, bias={bias})", plans[1]))
            wide = draft.add(f"self.{up}({{0}})", [value], None)
            act = choose.choice(("F.gelu", "torch.relu", "torch.tanh", "F.silu"))
            inner = draft.add(f"{act}({{0}})", [wide], None)
            draft.add(f"self.{down}({{0}})" + choose.choice(("", " + {1}")), [inner, value], shape)
        elif kind == 2:
            norm = choose.choice(("LayerNorm", "RMSNorm"))
            layers.append(Layer(f"norm{at}", f"torch.nn.{norm}({width})"))
            draft.add(f"self.norm{at}({{0}})", [value], shape)
        else:
            plan = "" if plain else "ColwiseParallel(output_layouts=Replicate())"
            layers.append(Layer(f"wide{at}", f"torch.nn.Linear({width}, {width})", plan))
            draft.add(f"self.wide{at}({{0}}) * {{0}}", [value], shape)
    return Program(
        "module",
        seed,
        (ranks,),
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(2),
        backward=True,
        layers=tuple(layers),
        data_parallel=choose.choice(("fully_shard", "replicate")) if plain else "",
        settings=settings(choose),
    )
