"""Programs of functional collectives, for the passes alone: what each rewrite looks for, and much beside it."""

from __future__ import annotations

from random import Random

from fuzzing.drawing import Draft, pass_options
from fuzzing.program import Input, Program

WIDTH = 4


def draw(seed: int) -> Program:
    """A program on local tensors [8, 4] and [8], group "0"; its settings are several sets of options."""
    choose = Random(seed)
    ranks = choose.choice((2, 2, 2, 2, 4))
    rows = 2 * ranks
    draft = Draft(choose)
    for at in range(choose.randint(2, 4)):
        dtype = choose.choice(("float32", "float32", "bfloat16"))
        draft.give(Input(f"x{at}", (rows, WIDTH), dtype, spread=True))
    for _ in range(choose.randint(2, 9)):
        choose.choice(_LINES)(draft, ranks, rows)
    dynamic = choose.random() < 0.1
    return Program(
        "graph",
        seed,
        (ranks,),
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(6),
        dynamic=dynamic,
        settings={"options": [{}, *(pass_options(choose) for _ in range(2))]},
    )


def _compute(draft: Draft, ranks: int, rows: int) -> None:
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


def _gather(draft: Draft, ranks: int, rows: int) -> None:
    """A gather of a part: of this rank's rows, a cast, a view; read whole, in part, cast, transposed."""
    value = draft.like((rows, WIDTH))
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
    text = part.replace("{n}", str(rows // ranks)).replace("{r}", str(ranks))
    piece = draft.add(text, [value], None)
    whole = draft.add(
        f"wait(c10d.all_gather_into_tensor({{0}}, {ranks}, '0'))", [piece], (rows, WIDTH)
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
        shape = (rows // 2, 2 * WIDTH) if "chunk" in after else (rows, WIDTH)
        draft.add(after, [whole], shape)


def _scatter(draft: Draft, ranks: int, rows: int) -> None:
    value = draft.like((rows, WIDTH))
    op = draft.choose.choice(("sum", "avg"))
    piece = draft.add(
        f"wait(c10d.reduce_scatter_tensor({{0}}.float(), '{op}', {ranks}, '0'))", [value], None
    )
    draft.add(f"torch.tanh({{0}}.repeat({ranks}, 1))", [piece], (rows, WIDTH))


def _reduce(draft: Draft, ranks: int, rows: int) -> None:
    """An all_reduce, whole, or of which a slice, a row or a sum is read, or which is expanded after."""
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
    text = f"wait(c10d.all_reduce({given}, '{op}', '0'))"
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


def _slice_of_reduce(draft: Draft, ranks: int, rows: int) -> None:
    """This rank's chunk of a sum, or of a gather, as a change of placement makes it."""
    value = draft.like((rows, WIDTH))
    start = "torch.ops._c10d_functional.all_reduce({0}.float(), 'sum', '0')"
    whole = draft.add(f"wait({start})", [value], None)
    at = draft.choose.randrange(2)
    chunk = draft.add(f"{{0}}.split({rows // ranks}, 0)[{at}]", [whole], None)
    draft.add(f"torch.tanh({{0}}.repeat({ranks}, 1))", [chunk], (rows, WIDTH))


def _twice(draft: Draft, ranks: int, rows: int) -> None:
    value = draft.like((rows, WIDTH))
    first = draft.add("wait(c10d.all_reduce({0}, 'sum', '0'))", [value], (rows, WIDTH))
    second = draft.add("wait(c10d.all_reduce({0}, 'sum', '0'))", [value], (rows, WIDTH))
    draft.add("torch.tanh({0}.float() - {1}.float() * 0.5)", [first, second], (rows, WIDTH))


def _tiny(draft: Draft, ranks: int, rows: int) -> None:
    values = [draft.like((rows, WIDTH)) for _ in range(3)]
    norms = [
        draft.add("wait(c10d.all_reduce({0}.float().square().sum(), 'sum', '0'))", [value], None)
        for value in values
    ]
    draft.add("torch.tanh({0}.float() / (1 + {1} + {2} + {3}))", [values[0], *norms], (rows, WIDTH))


def _exchange(draft: Draft, ranks: int, rows: int) -> None:
    splits = [rows // ranks] * ranks
    if draft.choose.random() < 0.2:  # the same on all ranks, and uneven: the first sends all of it
        splits = [0] * ranks
    value = draft.like((rows, WIDTH))
    if not any(splits):
        draft.add("wait(c10d.broadcast({0}, 0, '0'))", [value], (rows, WIDTH))
        return
    text = f"wait(c10d.all_to_all_single({{0}}.contiguous(), {splits}, {splits}, '0'))"
    draft.add(text, [value], (rows, WIDTH))


def _coalesced(draft: Draft, ranks: int, rows: int) -> None:
    shape = (rows, WIDTH)
    values = [draft.like(shape), draft.like(shape)]
    both = draft.add(
        "c10d.all_reduce_coalesced([{0}.float(), {1}.float()], 'sum', '0')", values, None
    )
    draft.add("torch.tanh(wait({0}[0]) - wait({0}[1]))", [both], shape)


def _late_wait(draft: Draft, ranks: int, rows: int) -> None:
    """A launch whose wait stands behind other work."""
    shape = (rows, WIDTH)
    launch = draft.add("c10d.all_reduce({0}.float(), 'sum', '0')", [draft.like(shape)], None)
    for _ in range(draft.choose.randint(1, 3)):
        draft.choose.choice((_compute, _reduce, _gather))(draft, ranks, rows)
    draft.add("torch.tanh(wait({0}))", [launch], shape)


def _write(draft: Draft, ranks: int, rows: int) -> None:
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
