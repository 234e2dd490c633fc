"""Programs on DTensors: random global shapes, even and uneven, placements, operators, views,
writes.
"""

from __future__ import annotations

from random import Random

from fuzzing.drawing import Draft, meshes, settings
from fuzzing.program import ROWS, Input, Program
from fuzzing.views import view, write

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
    "{0}.masked_fill({1} > 0, 0.5)",
    "({0} > {1}).double() + {0}",
    "torch.addcmul({0}, {0}, {1}, value=0.5)",
    "{0}.clamp(min=-0.5).exp()",
    "torch.zeros_like({0}) + {1}",
    "{0}.new_ones({0}.shape) * {1}",
    "torch.full_like({0}, 0.5) * {0}",
    "{0}.double().detach() + {1}",
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
    "{0} - {0}.std({d}, keepdim=True, correction=0)",
    "{0}.topk({0}.shape[{d}], {d}).values",
    "{0}.gather({d}, {0}.argsort({d}))",
    "{0}.index_select({d}, torch.arange({0}.shape[{d}]).flip(0))",
    "{0} * {0}.argmax({d}, keepdim=True)",
    "{0}.scatter_add({d}, {0}.argsort({d}), {0})",
    "F.layer_norm({0}, ({0}.shape[-1],))",
    "F.rms_norm({0}, ({0}.shape[-1],))",
)


def draw(seed: int) -> Program:
    """A program on two to four DTensors of one to three dimensions out of three sizes."""
    choose = Random(seed)
    dynamic = choose.random() < 0.12
    mesh = meshes(choose, costly=dynamic)
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


def _round_trip(draft: Draft, mesh_dims: int) -> None:
    """Through the local tensor, or the whole one, and back, computing between."""
    value = draft.any(1, 2, 3)
    shape = draft.shapes[value]
    back = "shape={0}.shape, stride={0}.stride()"
    text, whole = draft.choose.choice(
        (
            (
                f"DTensor.from_local({{0}}.to_local() * 2, mesh, {{0}}.placements, {back})",
                "{0} * 2",
            ),
            (
                "DTensor.from_local({0}.full_tensor() * 2, mesh, [Replicate()] * mesh.ndim)",
                "{0} * 2",
            ),
        )
    )
    # An uneven shard has a stride of its own: only what is contiguous comes back as it was.
    value = draft.add("{0}.contiguous()", [value], shape)
    draft.add(text, [value], shape, whole)


def _attention(draft: Draft, mesh_dims: int) -> None:
    """[batch, rows, width] attends to itself, with a head of its own for each batch."""
    values = [name for name, shape in draft.shapes.items() if len(shape) == 3]
    if not values:
        return _matmul(draft, mesh_dims)
    value = draft.choose.choice(values)
    causal = draft.choose.random() < 0.5
    text = (
        f"F.scaled_dot_product_attention(*[{{0}}.unsqueeze(1)] * 3, is_causal={causal}).squeeze(1)"
    )
    draft.add(text, [value], draft.shapes[value])
    return None


def _loss(draft: Draft, mesh_dims: int) -> None:
    value = draft.any(2) if any(len(s) == 2 for s in draft.shapes.values()) else draft.any()
    if len(draft.shapes[value]) != 2:
        return
    text = draft.choose.choice(
        (
            "F.cross_entropy({0}, {0}.detach().argmax(-1))",
            "F.cross_entropy({0}, {0}.detach().argmax(-1), reduction='sum')",
            "F.mse_loss({0}, {1})",
            "torch.linalg.vector_norm({0})",
            "F.embedding({0}.detach().argmax(-1) % {0}.shape[0], {0}).sum()",
        )
    )
    draft.add(text, [value, draft.like(draft.shapes[value])], ())


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
        text = (
            "torch.einsum('...i,ij->...j', {0}, {1})"
            if draft.choose.random() < 0.2
            else "{0} @ {1}"
        )
        draft.add(text, [left, right], (*shape[:-1], other[1]))
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
    name = draft.choose.choice(("sum", "mean", "amax", "logsumexp", "var", "prod"))
    keep = draft.choose.random() < 0.3
    left: Shape = (*shape[:dim], *((1,) if keep else ()), *shape[dim + 1 :])
    draft.add(f"{{0}}.{name}({dim}, keepdim={keep})", [value], left)


_LINES = (
    *(_elementwise,) * 3,
    *(_along,) * 3,
    *(_redistribute,) * 3,
    *(_matmul,) * 3,
    *(_reduce,) * 2,
    *(view,) * 4,
    *(write,) * 2,
    _round_trip,
    _attention,
    _loss,
)
