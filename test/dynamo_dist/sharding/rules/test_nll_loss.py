"""The loss of labels of which ranks have unequally many that count: to ignore, or of classes
with weights.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_dist.numerics.ranks import split, whole_tensor

pytestmark = pytest.mark.usefixtures("enabled")

CLASSES, IGNORED = 7, 3
WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
R, P, S0, S1, S2 = Replicate(), Partial(), *map(Shard, range(3))


def drawn(batch, *rest):
    """Logits and labels; the first labels, and so all of the first rank's, are to ignore."""
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(batch, CLASSES, *rest, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (batch, *rest), generator=generator)
    labels[: batch // 4 + 1] = IGNORED
    return logits, labels


SHAPES = ((8,), (5,), (8, 4))
DRAWN = {
    shape: drawn(*shape) for shape in SHAPES
}  # inside the fixture each rank would draw its own


def step(loss, logits, labels, weight):
    found = loss(logits, labels, weight)
    found.square().sum().backward()
    return found, logits.grad


LOSSES = {
    **{
        f"{function.__name__} {reduction}": lambda x, y, w, f=function, r=reduction: f(
            x, y, w, ignore_index=IGNORED, reduction=r
        )
        for function in (F.cross_entropy, F.nll_loss)
        for reduction in ("mean", "sum", "none")
    },
    "smoothed": lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=IGNORED, label_smoothing=0.2),
}


@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["no weights", "weights"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_device(ranks, name, shape, weight):
    logits, labels = DRAWN[shape]
    logits = logits.clone()
    layouts = [(S0, S0), (S1, S0), (P, R)]
    if len(shape) > 1:
        layouts.append((S2, S1))
    expected, gradient = step(LOSSES[name], logits.requires_grad_(), labels, weight)
    for of_logits, of_labels in layouts:
        x = split(logits, ranks, [of_logits], True)
        w = None if weight is None else split(weight, ranks, [R])
        found, of_x = step(LOSSES[name], x, split(labels, ranks, [of_labels]), w)
        torch.testing.assert_close(whole_tensor(found), expected.detach())
        torch.testing.assert_close(whole_tensor(of_x), gradient)


def test_equals_one_device_on_two_mesh_dimensions(grid):
    logits, labels = DRAWN[8, 4]
    logits = logits.clone()
    loss = LOSSES["cross_entropy mean"]
    expected, gradient = step(loss, logits.requires_grad_(), labels, WEIGHTS)
    for first, second in itertools.product([(S0, S0), (S2, S1), (S1, R), (R, R)], repeat=2):
        pairs = zip((logits, labels), zip(first, second, strict=True), strict=True)
        x, y = (split(t, grid, placements, t.is_floating_point()) for t, placements in pairs)
        found, of_x = step(loss, x, y, split(WEIGHTS, grid, [R, R]))
        torch.testing.assert_close(whole_tensor(found), expected.detach())
        torch.testing.assert_close(whole_tensor(of_x), gradient)


def test_nothing_that_counts_is_nan_as_on_one_device(ranks):
    logits, _ = DRAWN[8,]
    labels = torch.full((8,), IGNORED)
    found = LOSSES["cross_entropy mean"](
        split(logits, ranks, [S0]), split(labels, ranks, [S0]), None
    )
    assert whole_tensor(found).isnan()


def test_half_precision_does_not_overflow(ranks):
    logits = torch.zeros(4096, CLASSES, dtype=torch.float16)
    logits[:, 0] = 60
    labels = torch.ones(4096, dtype=torch.long)
    labels[:5] = -100
    found = F.cross_entropy(split(logits, ranks, [S0]), split(labels, ranks, [S0]))
    assert whole_tensor(found) == 60


def test_what_every_rank_has_stays_as_it_is(ranks):
    logits, labels = DRAWN[8,]
    for placement in (R, P):
        loss = F.nll_loss(split(logits, ranks, [placement]), split(labels, ranks, [R]))
        assert loss.placements == (placement,)
