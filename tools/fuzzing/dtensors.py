"""Programs on DTensors: random global shapes, even and uneven, placements, operators, views, writes."""

from __future__ import annotations

from random import Random

from fuzzing.drawing import MESHES, Draft, settings
from fuzzing.program import ROWS, Input, Program

Shape = tuple[int | str, ...]

# On any value, any two of a shape; the shape stays.
_ELEMENTWISE = (
    "torch.relu({0})",
    "torch.sigmoid({0} * 0.5)",
    "{0} + {1}",
    "{0} * {1}",
    "{0} - 2 * {1}",
    "{0} / (1 + {1} * {1})",
    "torch.where({0} > {1}, {0}, {1})",
    "torch.maximum({0}, {1})",
    "{0}.clone()",
    "{0}.contiguous()",
    "-{0} + 1",
    "torch.lerp({0}, {1}, 0.25)",
    "F.gelu({0})",
)
# Along a dimension; {d} is one. The shape stays.
_ALONG = (
    "torch.softmax({0}, {d})",
    "{0}.cumsum({d})",
    "F.normalize({0}, dim={d})",
    "{0} - {0}.mean({d}, keepdim=True)",
    "{0} + {0}.amax({d}, keepdim=True)",
    "torch.log_softmax({0}, {d})",
    "{0}.sort({d}).values",
    "{0}.flip({d})",
    "{0} * {0}.square().sum({d}, keepdim=True).add(1).rsqrt()",
)


def draw(seed: int) -> Program:
    """A program on two to four DTensors of one to three dimensions out of three sizes."""
    choose = Random(seed)
    mesh = choose.choice(MESHES)
    dynamic = choose.random() < 0.12
    even = choose.random() < 0.5
    sizes: list[int | str] = [
        choose.choice((4, 8, 12)) if even else choose.randint(2, 9) for _ in range(3)
    ]
    if dynamic:
        sizes[0] = ROWS
    draft = Draft(choose)
    grad = choose.random() < 0.4
    for at in range(choose.randint(2, 4)):
        shape = tuple(choose.choice(sizes) for _ in range(choose.choice((1, 2, 2, 2, 3))))
        given = Input(
            f"x{at}", shape, placements=_placements(choose, len(mesh), len(shape)), grad=grad
        )
        draft.give(given)
    for _ in range(choose.randint(2, 8)):
        choose.choice(_LINES)(draft, len(mesh))
    return Program(
        "dtensor",
        seed,
        mesh,
        tuple(draft.inputs),
        tuple(draft.statements),
        draft.outputs(),
        backward=grad,
        dynamic=dynamic,
        settings=settings(choose),
    )


def _placements(choose: Random, mesh_dims: int, dims: int) -> str:
    """Shards of random dimensions, or replicas, one for each dimension of the mesh."""
    kinds = [
        f"Shard({choose.randrange(dims)})" if dims and choose.random() < 0.6 else "Replicate()"
    ]
    kinds += [
        f"Shard({choose.randrange(dims)})" if dims and choose.random() < 0.6 else "Replicate()"
        for _ in range(mesh_dims - 1)
    ]
    return f"[{', '.join(kinds)}]"


def _elementwise(draft: Draft, mesh_dims: int) -> None:
    value = draft.any()
    shape = draft.shapes[value]
    draft.add(draft.choose.choice(_ELEMENTWISE), [value, draft.like(shape)], shape)


def _along(draft: Draft, mesh_dims: int) -> None:
    value = draft.any(1, 2, 3)
    shape = draft.shapes[value]
    dim = draft.choose.randrange(len(shape))
    text = draft.choose.choice(_ALONG).replace("{d}", str(dim))
    draft.add(text, [value], shape)


def _redistribute(draft: Draft, mesh_dims: int) -> None:
    value = draft.any(1, 2, 3)
    shape = draft.shapes[value]
    placements = _placements(draft.choose, mesh_dims, len(shape))
    draft.add(f"{{0}}.redistribute(placements={placements})", [value], shape, "{0}")


def _matmul(draft: Draft, mesh_dims: int) -> None:
    """A product of two values that fit, turned as needed."""
    left = draft.any(2, 3) if any(len(s) > 1 for s in draft.shapes.values()) else None
    if left is None:
        return _elementwise(draft, mesh_dims)
    shape = draft.shapes[left]
    rights = [n for n, s in draft.shapes.items() if len(s) == 2 and shape[-1] in s]
    if not rights:
        draft.add("{0} @ {0}.transpose(-1, -2)", [left], (*shape[:-1], shape[-2]))
        return None
    right = draft.choose.choice(rights)
    other = draft.shapes[right]
    if other[0] == shape[-1]:
        draft.add("{0} @ {1}", [left, right], (*shape[:-1], other[1]))
    else:
        text = draft.choose.choice(("{0} @ {1}.t()", "F.linear({0}, {1})"))
        draft.add(text, [left, right], (*shape[:-1], other[0]))
    return None


def _reduce(draft: Draft, mesh_dims: int) -> None:
    value = draft.any(2, 3) if any(len(s) > 1 for s in draft.shapes.values()) else draft.any()
    shape = draft.shapes[value]
    if not shape:
        return
    dim = draft.choose.randrange(len(shape))
    name = draft.choose.choice(("sum", "mean", "amax", "logsumexp"))
    keep = draft.choose.random() < 0.3
    left: Shape = (*shape[:dim], *((1,) if keep else ()), *shape[dim + 1 :])
    draft.add(f"{{0}}.{name}({dim}, keepdim={keep})", [value], left)


def _view(draft: Draft, mesh_dims: int) -> None:
    value = draft.any(2, 3) if any(len(s) > 1 for s in draft.shapes.values()) else draft.any()
    shape = draft.shapes[value]
    if len(shape) < 2:
        draft.add("{0}.unsqueeze(0)", [value], (1, *shape))
        return
    dim = draft.choose.randrange(len(shape))
    last: Shape = (*shape[:-2], shape[-1], shape[-2])
    kinds: list[tuple[str, Shape]] = [
        ("{0}.transpose(-1, -2)", last),
        ("{0}.transpose(-1, -2).contiguous()", last),
        (f"{{0}}.unsqueeze({dim})", (*shape[:dim], 1, *shape[dim:])),
        (f"{{0}}.select({dim}, 0)", (*shape[:dim], *shape[dim + 1 :])),
        (f"{{0}}.unbind({dim})[-1]", (*shape[:dim], *shape[dim + 1 :])),
    ]
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) == len(shape):
        kinds.append(("{0}.flatten(0, 1)", (sizes[0] * sizes[1], *sizes[2:])))
        kinds.append(
            (f"torch.cat([{{0}}, {{0}}], {dim})", (*sizes[:dim], 2 * sizes[dim], *sizes[dim + 1 :]))
        )
        if sizes[dim] > 1:
            kinds.append(
                (
                    f"{{0}}.narrow({dim}, 1, {sizes[dim] - 1})",
                    (*sizes[:dim], sizes[dim] - 1, *sizes[dim + 1 :]),
                )
            )
        if sizes[dim] % 2 == 0:
            kinds.append(
                (f"{{0}}.chunk(2, {dim})[1]", (*sizes[:dim], sizes[dim] // 2, *sizes[dim + 1 :]))
            )
            kinds.append(
                (
                    f"{{0}}.reshape({(*sizes[:dim], sizes[dim] // 2, 2, *sizes[dim + 1 :])})",
                    (*sizes[:dim], sizes[dim] // 2, 2, *sizes[dim + 1 :]),
                )
            )
    text, new = draft.choose.choice(kinds)
    if len(new) <= 4:
        draft.add(text, [value], new)


def _write(draft: Draft, mesh_dims: int) -> None:
    """In place on a fresh tensor, or on an input that needs no gradient."""
    value = draft.any()
    shape = draft.shapes[value]
    plain = [given.name for given in draft.inputs if not given.grad and given.shape == shape]
    if plain and draft.choose.random() < 0.5:
        own = draft.choose.choice(plain)
    else:
        own = draft.add("{0} * 1", [value], shape)
    text = draft.choose.choice(
        (
            "{0}.add_({1})",
            "{0}.mul_(0.5)",
            "{0}.copy_({1})",
            "{0}.clamp_(-1, 1)",
            "{0}.relu_()",
            "{0}.fill_(2.0)",
        )
    )
    draft.effect(text, [own, draft.like(shape)])


_LINES = (
    _elementwise,
    _elementwise,
    _along,
    _redistribute,
    _redistribute,
    _matmul,
    _matmul,
    _reduce,
    _view,
    _view,
    _write,
)
