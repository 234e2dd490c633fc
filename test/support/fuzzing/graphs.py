"""Programs of functional collectives, for the passes alone: what each rewrite looks for, and
much beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from fuzzing.drawing import Draft, pass_options
from fuzzing.program import Input, Program

WIDTH = 4
WORLD = "'0'"


@dataclass(frozen=True, slots=True)
class Group:
    """``name`` as Python text; ``GROUPS`` are those of the mesh's dimensions."""

    name: str
    size: int


def draw(seed: int) -> Program:
    """A program on local tensors [rows, 4]; its settings are several sets of options."""
    choose = Random(seed)
    mesh = choose.choice(((2,), (2,), (2,), (2,), (4,), (2, 2)))
    ranks = math.prod(mesh)
    groups = [Group(WORLD, ranks)]
    if len(mesh) > 1:
        groups += [Group(f"GROUPS[{dim}]", size) for dim, size in enumerate(mesh)]
    rows = 2 * ranks
    draft = Draft(choose)
    for at in range(choose.randint(2, 4)):
        dtype = choose.choice(("float32", "float32", "bfloat16"))
        draft.give(Input(f"x{at}", (rows, WIDTH), dtype, spread=True))
    for _ in range(choose.randint(2, 9)):
        choose.choice(_LINES)(draft, choose.choice(groups), rows)
    for _ in range(choose.choice((0, 0, 1, 2))):  # at the end, where a functional graph has them
        _write(draft, choose.choice(groups), rows)
    dynamic = choose.random() < 0.1
    return Program(
        "graph",
        seed,
        mesh,
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(6),
        dynamic=dynamic,
        settings={"options": [{}, *(pass_options(choose) for _ in range(2))]},
    )


def _compute(draft: Draft, group: Group, rows: int) -> None:
    text = draft.choose.choice(
        (
            "torch.tanh({0}.float() @ {1}.float().t()) @ {1}.float()",
            "torch.tanh({0}.float() + {1}.float())",
            "{0}.float().abs().add(1).reciprocal()",
            "{0}.bfloat16()",
            "{0}.float()",
            "{0}.clone()",
            "{0}.t().contiguous().t()",
            "torch.cat([{1}, {0}])[:{0}.shape[0]].to({0}.dtype)",
            "{0}.flip(0)",
        )
    )
    shape = (rows, WIDTH)
    draft.add(text, [draft.like(shape), draft.like(shape)], shape)


def _gather(draft: Draft, group: Group, rows: int) -> None:
    """A gather of a part: of this rank's rows, a cast, a view; read whole, in part, cast,
    transposed.
    """
    shape = (rows, WIDTH)
    given = draft.choose.random() < 0.5  # an input, which may be written to later
    value = draft.choose.choice(draft.inputs).name if given else draft.like(shape)
    part = draft.choose.choice(
        (
            "{0}[: {n}].contiguous()",
            "{0}[: {n}].float()",
            "{0}[: {n}].float().contiguous()",
            "{0}.chunk({r})[1].clone()",
            "torch.tanh({0}[{n} :][: {n}])",
            "{0}[: {n}].reshape(-1).float().view({n}, -1)",
        )
    )
    text = part.replace("{n}", str(rows // group.size)).replace("{r}", str(group.size))
    piece = draft.add(text, [value], None)
    whole = draft.add(
        f"wait(c10d.all_gather_into_tensor({{0}}, {group.size}, {group.name}))",
        [piece],
        shape,
    )
    if draft.choose.random() < 0.4:
        after = draft.choose.choice(
            (
                "{0}.bfloat16()",
                "{0}.t().contiguous().t()",
                "{0} * 2",
                "torch.cat({0}.chunk(2, 0), 1)",
            )
        )
        draft.add(after, [whole], (rows // 2, 2 * WIDTH) if "chunk" in after else shape)


def _scatter(draft: Draft, group: Group, rows: int) -> None:
    value = draft.like((rows, WIDTH))
    op = draft.choose.choice(("sum", "avg"))
    piece = draft.add(
        f"wait(c10d.reduce_scatter_tensor({{0}}.float(), '{op}', {group.size}, {group.name}))",
        [value],
        None,
    )
    draft.add(f"torch.tanh({{0}}.repeat({group.size}, 1))", [piece], (rows, WIDTH))


def _reduce(draft: Draft, group: Group, rows: int) -> None:
    """An all_reduce, whole, or of which a slice, a row or a sum is read, or which is expanded
    after.
    """
    value = draft.like((rows, WIDTH))
    op = draft.choose.choice(("sum", "sum", "avg", "max"))
    given = draft.choose.choice(
        (
            "{0}",
            "{0}.float()",
            "{0}.float().sum(0)",
            "{0}.float().expand(3, -1, -1)",
            "{0}.float().sum()",
        )
    )
    text = f"wait(c10d.all_reduce({given}, '{op}', {group.name}))"
    reduced = draft.add(text, [value], None)
    read = draft.choose.choice(
        (
            "torch.tanh({0} * torch.ones_like({1}))"
            if given.endswith(("sum(0)", "sum()"))
            else "torch.tanh({0}[..., : {1}.shape[0], :].reshape(-1, 4)[: {1}.shape[0]])",
            "torch.tanh({0}.sum() + {1})",
        )
    )
    draft.add(read, [reduced, value], (rows, WIDTH))


def _slice_of_reduce(draft: Draft, group: Group, rows: int) -> None:
    """This rank's chunk of a sum, or of a gather, as a change of placement makes it."""
    value = draft.like((rows, WIDTH))
    start = f"torch.ops._c10d_functional.all_reduce({{0}}.float(), 'sum', {group.name})"
    whole = draft.add(f"wait({start})", [value], None)
    at = draft.choose.randrange(2)
    chunk = draft.add(f"{{0}}.split({rows // group.size}, 0)[{at}]", [whole], None)
    draft.add(f"torch.tanh({{0}}.repeat({group.size}, 1))", [chunk], (rows, WIDTH))


def _twice(draft: Draft, group: Group, rows: int) -> None:
    value = draft.like((rows, WIDTH))
    first = draft.add(f"wait(c10d.all_reduce({{0}}, 'sum', {group.name}))", [value], (rows, WIDTH))
    second = draft.add(f"wait(c10d.all_reduce({{0}}, 'sum', {group.name}))", [value], (rows, WIDTH))
    draft.add("torch.tanh({0}.float() - {1}.float() * 0.5)", [first, second], (rows, WIDTH))


def _tiny(draft: Draft, group: Group, rows: int) -> None:
    values = [draft.like((rows, WIDTH)) for _ in range(3)]
    norms = [
        draft.add(
            f"wait(c10d.all_reduce({{0}}.float().square().sum(), 'sum', {group.name}))",
            [value],
            None,
        )
        for value in values
    ]
    draft.add("torch.tanh({0}.float() / (1 + {1} + {2} + {3}))", [values[0], *norms], (rows, WIDTH))


def _exchange(draft: Draft, group: Group, rows: int) -> None:
    splits = [rows // group.size] * group.size
    value = draft.like((rows, WIDTH))
    if group.name == WORLD and draft.choose.random() < 0.2:
        draft.add(f"wait(c10d.broadcast({{0}}, 0, {group.name}))", [value], (rows, WIDTH))
        return
    text = f"wait(c10d.all_to_all_single({{0}}.contiguous(), {splits}, {splits}, {group.name}))"
    draft.add(text, [value], (rows, WIDTH))


def _coalesced(draft: Draft, group: Group, rows: int) -> None:
    shape = (rows, WIDTH)
    values = [draft.like(shape), draft.like(shape)]
    both = draft.add(
        f"c10d.all_reduce_coalesced([{{0}}.float(), {{1}}.float()], 'sum', {group.name})",
        values,
        None,
    )
    draft.add("torch.tanh(wait({0}[0]) - wait({0}[1]))", [both], shape)


def _late_wait(draft: Draft, group: Group, rows: int) -> None:
    """A launch whose wait stands behind other work."""
    shape = (rows, WIDTH)
    launch = draft.add(
        f"c10d.all_reduce({{0}}.float(), 'sum', {group.name})", [draft.like(shape)], None
    )
    for _ in range(draft.choose.randint(1, 3)):
        draft.choose.choice((_compute, _reduce, _gather))(draft, group, rows)
    draft.add("torch.tanh(wait({0}))", [launch], shape)


def _write(draft: Draft, group: Group, rows: int) -> None:
    """A write to an input, which everything around it has to respect."""
    target = draft.choose.choice(draft.inputs).name
    value = draft.like((rows, WIDTH))
    draft.add("{0}.copy_(torch.tanh({1}))", [target, value], (rows, WIDTH))


_LINES = (
    _compute,
    _compute,
    _gather,
    _gather,
    _scatter,
    _reduce,
    _reduce,
    _slice_of_reduce,
    _twice,
    _tiny,
    _exchange,
    _coalesced,
    _late_wait,
    _write,
)
