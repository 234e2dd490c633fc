"""Programs of ``torch.distributed`` calls on plain tensors: in place, into lists, asynchronous,
on several groups.
"""

from __future__ import annotations

from random import Random

from fuzzing.drawing import Draft, meshes, settings
from fuzzing.program import ROWS, Input, Program

WIDTH = 3


def draw(seed: int) -> Program:
    """Each rank has tensors [n, 3] of its own; n is 12, or 24 in the second call of a dynamic
    program.
    """
    choose = Random(seed)
    mesh = meshes(choose)
    draft = Draft(choose)
    backward = choose.random() < 0.3
    for at in range(choose.randint(1, 3)):
        dtype = "float64" if backward else choose.choice(("float64", "float32", "int64"))
        draft.give(Input(f"x{at}", (ROWS, WIDTH), dtype, spread=True, grad=backward))
    dims = choose.sample(range(len(mesh)), min(len(mesh), choose.randint(1, 2)))
    groups = [draft.add(f"mesh.get_group({dim})", [], None) for dim in dims]
    for _ in range(choose.randint(2, 8)):
        lines = _DIFFERENTIABLE if backward else _LINES
        choose.choice(lines)(draft, choose.choice(groups))
    return Program(
        "c10d",
        seed,
        mesh,
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(),
        backward=backward,
        dynamic=choose.random() < 0.2,
        settings=settings(choose),
    )


def _value(draft: Draft) -> str:
    return draft.like((ROWS, WIDTH))


def _group(draft: Draft, group: str) -> tuple[str, list[str]]:
    return draft.choose.choice(((", group={1}", [group]), ("", [])))


def _compute(draft: Draft, group: str) -> None:
    text = draft.choose.choice(
        (
            "{0} + {1}",
            "{0} * 2 - {1}",
            "{0}.clone()",
            "torch.where({0} > {1}, {0}, {1})",
            "{0} * (dist.get_rank() + 1)",
            "{0} + mesh.size()",
            "{0}.flip(0) * mesh.get_local_rank(0)",
            "{0}.cumsum(0) - {1}",
            "torch.cat([{0}, {1}])[{0}.shape[0] :]",
        )
    )
    draft.add(text, [_value(draft), _value(draft)], (ROWS, WIDTH))


def _own(draft: Draft) -> str:
    """What may be written to: a fresh copy mostly, else an input that needs no gradient."""
    plain = [given.name for given in draft.inputs if not given.grad and given.name in draft.shapes]
    if plain and draft.choose.random() < 0.25:
        return draft.choose.choice(plain)
    return draft.add("{0} * 1", [_value(draft)], (ROWS, WIDTH))


def _all_reduce(draft: Draft, group: str) -> None:
    op = draft.choose.choice(("", ", op=dist.ReduceOp.MAX", ", op=dist.ReduceOp.SUM"))
    where, more = _group(draft, group)
    target = draft.choose.choice(("{0}", "{0}", "{0}[1]", "{0}.view(-1)", "{0}[: 4]"))
    draft.effect(f"dist.all_reduce({target}{op}{where})", [_own(draft), *more])


def _all_reduce_async(draft: Draft, group: str) -> None:
    where, more = _group(draft, group)
    own = draft.add("{0} * 1", [_value(draft)], (ROWS, WIDTH))  # no input: others have to be left
    hidden = draft.shapes.pop(own)
    work = draft.add(f"dist.all_reduce({{0}}, async_op=True{where})", [own, *more], None)
    for _ in range(draft.choose.randint(0, 2)):
        draft.choose.choice((_compute, _all_reduce, _gather))(draft, group)
    draft.effect("{0}.wait()", [work])
    draft.shapes[own] = hidden
    draft.add("{0} + 1", [own], hidden)


def _two_in_flight(draft: Draft, group: str) -> None:
    """Two launches, whose waits come in either order; the first may be waited for twice."""
    first, second = (draft.add("{0} * 1", [_value(draft)], None) for _ in range(2))
    starts = (
        "dist.all_reduce({0}, async_op=True, group={1})",
        "dist.broadcast({0}, group={1}, group_src=0, async_op=True)",
        "dist.all_to_all_single({0}, {0}.clone(), group={1}, async_op=True)",
        "dist.reduce_scatter_tensor({0}, {0}.repeat({1}.size(), 1), group={1}, async_op=True)",
    )
    works = [draft.add(draft.choose.choice(starts), [own, group], None) for own in (first, second)]
    _compute(draft, group)
    draft.choose.shuffle(works)
    for work in (*works, *works[: draft.choose.randrange(2)]):
        draft.effect("{0}.wait()", [work])
    draft.add("{0} - {1} * 2", [first, second], (ROWS, WIDTH))


def _rooted(draft: Draft, group: str) -> None:
    """To and from one rank. What a reduce leaves on other ranks is not defined, so it is not
    read.
    """
    own = draft.add("{0} * 1", [_value(draft)], None)
    root = f"{draft.choose.randrange(2)} % {{1}}.size()"
    kind = draft.choose.randrange(2)
    if kind:
        draft.effect(f"dist.reduce({{0}}, group={{1}}, group_dst={root})", [own, group])
        draft.effect(f"dist.broadcast({{0}}, group={{1}}, group_src={root})", [own, group])
    else:
        parts = draft.add(
            f"[{{0}} * (at + 1) for at in range({{1}}.size())] "
            f"if dist.get_rank({{1}}) == {root} else None",
            [own, group],
            None,
        )
        draft.effect(
            f"dist.scatter({{0}}, {{2}}, group={{1}}, group_src={root})", [own, group, parts]
        )
    draft.add("{0} + 1", [own], (ROWS, WIDTH))


def _lists(draft: Draft, group: str) -> None:
    """One tensor for each rank of the group."""
    value = _value(draft)
    parts = draft.add("[{0} * (at + 1) for at in range({1}.size())]", [value, group], None)
    if draft.choose.random() < 0.5:
        into = draft.add("[torch.empty_like(each) for each in {0}]", [parts], None)
        draft.effect("dist.all_to_all({0}, {1}, group={2})", [into, parts, group])
        draft.add("{0}[0] + {0}[-1] * 2", [into], (ROWS, WIDTH))
    else:
        own = draft.add("{0} * 1", [value], (ROWS, WIDTH))
        draft.effect("dist.reduce_scatter({0}, {1}, group={2})", [own, parts, group])


def _write(draft: Draft, group: str) -> None:
    """In place, through a view now and then, on what a collective may write to as well."""
    text = draft.choose.choice(("{0}.mul_(2)", "{0}[1:].add_({1}[1:])", "{0}.t()[0].zero_()"))
    draft.effect(text, [_own(draft), _value(draft)])


def _pair(draft: Draft, group: str) -> None:
    """Neighbours exchange rows by ``isend`` and ``irecv``, whose works are waited for one by
    one.
    """
    value = _value(draft)
    own = draft.add("{0} * 1", [value], None)
    size, rank = "dist.get_world_size()", "dist.get_rank()"
    sent = draft.add(f"dist.isend({{0}}, ({rank} + 1) % {size})", [value], None)
    taken = draft.add(f"dist.irecv({{0}}, ({rank} - 1) % {size})", [own], None)
    _compute(draft, group)
    draft.effect("{0}.wait()", [taken])
    draft.effect("{0}.wait()", [sent])
    draft.add("{0} * 2", [own], (ROWS, WIDTH))


def _gather(draft: Draft, group: str) -> None:
    parts = draft.add(
        "[torch.empty_like({0}) for _ in range({1}.size())]", [_value(draft), group], None
    )
    draft.effect("dist.all_gather({0}, {1}, group={2})", [parts, _value_like(draft, parts), group])
    draft.add("{0}[0] - {0}[-1] * 3", [parts], (ROWS, WIDTH))


def _value_like(draft: Draft, parts: str) -> str:
    """What the list was made after: the same type."""
    return next(s.operands[0] for s in draft.statements if s.target == parts)


def _gather_into(draft: Draft, group: str) -> None:
    value = _value(draft)
    rows = "{0}.shape[0] * {1}.size(), 3"
    whole = draft.add(f"{{0}}.new_empty({rows})", [value, group], None)
    name = draft.choose.choice(("all_gather_into_tensor",))
    if draft.choose.random() < 0.5:
        work = draft.add(
            f"dist.{name}({{0}}, {{1}}, group={{2}}, async_op=True)", [whole, value, group], None
        )
        _compute(draft, group)
        draft.effect("{0}.wait()", [work])
    else:
        draft.effect(f"dist.{name}({{0}}, {{1}}, group={{2}})", [whole, value, group])
    draft.add("{0}[: {1}.shape[0]] + {0}[-{1}.shape[0] :]", [whole, value], (ROWS, WIDTH))


def _reduce_scatter(draft: Draft, group: str) -> None:
    value = _value(draft)
    wide = draft.add("{0}.repeat({1}.size(), 1) * 2", [value, group], None)
    own = draft.add("{0} * 1", [value], (ROWS, WIDTH))
    draft.effect("dist.reduce_scatter_tensor({0}, {1}, group={2})", [own, wide, group])


def _broadcast(draft: Draft, group: str) -> None:
    own = _own(draft)
    text = draft.choose.choice(
        ("dist.broadcast({0}, group={1}, group_src=0)", "dist.broadcast({0}, 0)")
    )
    draft.effect(text, [own, group])


def _exchange(draft: Draft, group: str) -> None:
    value = _value(draft)
    own = draft.add("{0} * 1", [value], (ROWS, WIDTH))
    draft.effect("dist.all_to_all_single({0}, {1}, group={2})", [own, value, group])


def _exchange_uneven(draft: Draft, group: str) -> None:
    """Rank r gives each peer p as many rows as p + 1: shapes differ from rank to rank."""
    value = _value(draft)
    gives = draft.add("[p + 1 for p in range({0}.size())]", [group], None)
    takes = draft.add("[dist.get_rank({0}) + 1] * {0}.size()", [group], None)
    given = draft.add("{0}[:1].repeat(sum({1}), 1)", [value, gives], None)
    taken = draft.add("{0}.new_empty(sum({1}), 3)", [value, takes], None)
    draft.effect(
        "dist.all_to_all_single({0}, {1}, {2}, {3}, group={4})", [taken, given, takes, gives, group]
    )
    draft.add("{0}.sum(0) + {1}", [taken, value], (ROWS, WIDTH))


def _funcol(draft: Draft, group: str) -> None:
    value = _value(draft)
    text = draft.choose.choice(
        (
            "fc.all_reduce({0}, 'sum', {1}) * 2",
            "fc.all_gather_tensor({0}, 0, {1})[: {0}.shape[0]] * 2",
            "fc.reduce_scatter_tensor({0}.repeat({1}.size(), 1), 'sum', 0, {1}) * 2",
            "fc.all_to_all_single({0}, None, None, {1}) * 2",
        )
    )
    draft.add(text, [value, group], (ROWS, WIDTH))


def _differentiable(draft: Draft, group: str) -> None:
    value = _value(draft)
    text = draft.choose.choice(
        (
            "fc.all_gather_tensor_autograd({0}, 0, {1})[: {0}.shape[0]] * 2",
            "fc.reduce_scatter_tensor_autograd({0}.repeat({1}.size(), 1), 'sum', 0, {1}) * 2",
            "fc.all_to_all_single_autograd({0}, None, None, {1}) * 2",
            "dnf.all_reduce({0} * 1, group={1})",
            # Not dnf.all_gather: its gradient is a graph break (test_nn_functional_gradients.py).
        )
    )
    draft.add(text, [value, group], (ROWS, WIDTH))


def _ring(draft: Draft, group: str) -> None:
    value = _value(draft)
    own = draft.add("{0} * 1", [value], None)
    size, rank = "dist.get_world_size()", "dist.get_rank()"
    works = draft.add(
        f"dist.batch_isend_irecv([dist.P2POp(dist.isend, {{1}}, ({rank} + 1) % {size}), "
        f"dist.P2POp(dist.irecv, {{0}}, ({rank} - 1) % {size})])",
        [own, value],
        None,
    )
    _compute(draft, group)
    draft.effect("[work.wait() for work in {0}]", [works])
    draft.add("{0} + 1", [own], (ROWS, WIDTH))


def _barrier(draft: Draft, group: str) -> None:
    draft.effect("dist.barrier(group={0})", [group])


_LINES = (
    *(_compute,) * 3,
    *(_all_reduce,) * 2,
    *(_all_reduce_async,) * 2,
    _two_in_flight,
    _gather,
    _gather_into,
    _reduce_scatter,
    _broadcast,
    _rooted,
    _lists,
    _exchange,
    _exchange_uneven,
    _funcol,
    _ring,
    _pair,
    _write,
    _barrier,
)
_DIFFERENTIABLE = (_compute, _compute, _funcol, _differentiable, _differentiable)
