"""Lines on DTensors that look at a part of a value, turn it, or write to it."""

from __future__ import annotations

import math

from fuzzing.drawing import Draft

Shape = tuple[int | str, ...]
_MOST_DIMS = 4

# To a tensor of {0}'s shape, from one like it.
_WRITES = (
    "{0}.add_({1})",
    "{0}.mul_(0.5)",
    "{0}.copy_({1})",
    "{0}.clamp_(-1, 1)",
    "{0}.relu_()",
    "{0}.fill_(2.0)",
    "{0}.sub_({0})",
    "{0}[...] = {1}",
)
# Through a view; of one dimension at least, and of two.
_WRITES_THROUGH = (
    "{0}[0].add_(1)",
    "{0}[1:] = 0",
    "{0}[-1].copy_({1}[0])",
    "{0}.view_as({1}).neg_()",
)
_WRITES_THROUGH_TWO = (
    "{0}.transpose(0, 1).mul_(3)",
    "{0}[:, 0].zero_()",
    "{0}.select(1, 0).copy_({1}.select(1, 0))",
)


def view(draft: Draft, mesh_dims: int) -> None:
    """A view, or a copy that moves data about."""
    value = draft.any(2, 3) if any(len(s) > 1 for s in draft.shapes.values()) else draft.any()
    shape = draft.shapes[value]
    if len(shape) < 2:
        draft.add("{0}.unsqueeze(0)", [value], (1, *shape))
        return
    dim = draft.choose.randrange(len(shape))
    sizes = [size for size in shape if isinstance(size, int)]
    kinds = _of_any_size(shape, dim)
    if len(sizes) == len(shape):
        kinds += _of_known_size(tuple(sizes), dim)
    text, new = draft.choose.choice(kinds)
    if len(new) <= _MOST_DIMS:
        draft.add(text, [value], new)


def _of_any_size(shape: Shape, dim: int) -> list[tuple[str, Shape]]:
    last: Shape = (*shape[:-2], shape[-1], shape[-2])
    without: Shape = (*shape[:dim], *shape[dim + 1 :])
    return [
        ("{0}.transpose(-1, -2)", last),
        ("{0}.transpose(-1, -2).contiguous()", last),
        (f"{{0}}.movedim({dim}, 0)", (shape[dim], *without)),
        (f"{{0}}.unsqueeze({dim})", (*shape[:dim], 1, *shape[dim:])),
        (f"{{0}}.unsqueeze({dim}).squeeze({dim})", shape),
        (
            f"{{0}}.unsqueeze({dim}).expand{(*[-1] * dim, 3, *[-1] * (len(shape) - dim))}",
            (*shape[:dim], 3, *shape[dim:]),
        ),
        (f"{{0}}.select({dim}, 0)", without),
        (f"{{0}}.unbind({dim})[-1]", without),
        (f"torch.stack([{{0}}, {{0}} * 2], {dim})", (*shape[:dim], 2, *shape[dim:])),
        (f"{{0}}.roll(1, {dim})", shape),
        ("{0}.tril()", shape),
        ("{0}[..., None]", (*shape, 1)),
    ]


def _of_known_size(sizes: tuple[int, ...], dim: int) -> list[tuple[str, Shape]]:
    size, before, after = sizes[dim], sizes[:dim], sizes[dim + 1 :]
    step = f"{':, ' * dim}::2"
    kinds: list[tuple[str, Shape]] = [
        ("{0}.flatten(0, 1)", (sizes[0] * sizes[1], *sizes[2:])),
        ("{0}.reshape(-1)", (math.prod(sizes),)),
        (f"torch.cat([{{0}}, {{0}}], {dim})", (*before, 2 * size, *after)),
        (f"{{0}}[{step}]", (*before, (size + 1) // 2, *after)),
        ("F.pad({0}, (1, 2))", (*sizes[:-1], sizes[-1] + 3)),
        (f"{{0}}.repeat_interleave(2, {dim})", (*before, 2 * size, *after)),
    ]
    if size > 1:
        kinds += [
            (f"{{0}}.narrow({dim}, 1, {size - 1})", (*before, size - 1, *after)),
            (f"{{0}}.split([1, {size - 1}], {dim})[1]", (*before, size - 1, *after)),
        ]
    if size % 2 == 0:
        halved = (*before, size // 2, 2, *after)
        kinds += [
            (f"{{0}}.chunk(2, {dim})[1]", (*before, size // 2, *after)),
            (f"{{0}}.reshape({halved})", halved),
            (f"{{0}}.unflatten({dim}, (2, {size // 2}))", (*before, 2, size // 2, *after)),
        ]
    return kinds


def write(draft: Draft, mesh_dims: int) -> None:
    """In place on a fresh tensor, or on an input that needs no gradient; through a view now and
    then.
    """
    value = draft.any()
    shape = draft.shapes[value]
    plain = [given.name for given in draft.inputs if not given.grad and given.shape == shape]
    if plain and draft.choose.random() < 0.5:
        own = draft.choose.choice(plain)
        # Whether what was read from it before is its own memory depends on placements.
        read = any(own in statement.operands for statement in draft.statements)
        whole = None if read else ""
    else:
        own, whole = draft.add("{0} * 1", [value], shape), ""
    texts = _WRITES
    if shape and draft.choose.random() < 0.4:
        # A part along a sharded dimension is a copy, in eager mode too: one device has another
        # result.
        texts, whole = _WRITES_THROUGH + _WRITES_THROUGH_TWO * (len(shape) > 1), None
    draft.effect(draft.choose.choice(texts), [own, draft.like(shape)], whole)
