"""Samples of which ranks count unequally much: labels to ignore, weights of classes, paddings,
masks.

The database draws labels and weights alike for all rows, so that a mean of the ranks' means is
often the mean. Here the first rows count little or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from comparison.strategies.samples import Sample

ROWS, CLASSES, IGNORED = 8, 5, 2


def _drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _labels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    labels = torch.randint(CLASSES, shape, generator=generator)
    labels[: shape[0] // 2 - 1] = IGNORED
    return labels


def _weights(*shape: int) -> torch.Tensor:
    """Growing along the first dimension, from zero on."""
    steps = torch.arange(shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return steps.expand(shape).clone()


def _of_labels(function: Callable[..., Any], **options: Any) -> list[Sample]:
    found = []
    for rest in ((), (3,), (2, 3)):
        for reduction in ("mean", "sum", "none"):
            for weight in (None, _weights(CLASSES)):
                logits = _drawn(ROWS, CLASSES, *rest).log_softmax(1)
                kwargs = {"ignore_index": IGNORED, "reduction": reduction, **options}
                if weight is not None:
                    kwargs["weight"] = weight
                found.append(Sample(function, (logits, _labels(ROWS, *rest)), kwargs))
    return found


def _weighted(function: Callable[..., Any], *tensors: torch.Tensor) -> list[Sample]:
    weight = _weights(*tensors[0].shape)
    return [
        Sample(function, tensors, {"weight": weight, "reduction": reduction})
        for reduction in ("mean", "sum", "none")
    ]


def _reduced(function: Callable[..., Any]) -> list[Sample]:
    """Over values of which the first rows have few numbers."""
    holes = _drawn(ROWS, 6)
    holes[:3, 1:] = torch.nan
    return [Sample(function, (holes,), {}), Sample(function, (holes,), {"dim": 0})]


def _padded() -> list[Sample]:
    """Bags of a table, of which the first are mostly padding."""
    indices, starts = _labels(4 * ROWS), torch.arange(0, 4 * ROWS, 4)
    return [
        Sample(
            F.embedding_bag,
            (indices, _drawn(CLASSES, 6), starts),
            {"mode": mode, "padding_idx": IGNORED},
        )
        for mode in ("mean", "sum")
    ]


def _embedded() -> list[Sample]:
    options = ({"padding_idx": IGNORED}, {"padding_idx": IGNORED, "scale_grad_by_freq": True})
    return [Sample(F.embedding, (_labels(ROWS, 4), _drawn(CLASSES, 6)), each) for each in options]


def _sequences() -> list[Sample]:
    """Of unequal lengths; a mean divides by those of the targets."""
    inputs = _drawn(10, ROWS, CLASSES).log_softmax(2)
    targets = torch.ones(ROWS, 4, dtype=torch.long)
    lengths = torch.full((ROWS,), 10), torch.tensor([1, 1, 1, 2, 4, 4, 4, 3])
    return [
        Sample(F.ctc_loss, (inputs, targets, *lengths), {"reduction": reduction})
        for reduction in ("mean", "sum", "none")
    ]


def _pooled() -> list[Sample]:
    """Windows that reach over the edge: of those, padding counts or not."""
    return [
        Sample(
            F.avg_pool2d,
            (_drawn(4, 2, 9, 7), 3, 2, 1),
            {"ceil_mode": True, "count_include_pad": included},
        )
        for included in (True, False)
    ]


def _probability() -> torch.Tensor:
    return _drawn(ROWS, 6).sigmoid()


# Operators of the database by name -> more samples of them.
SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    "nn_functional_cross_entropy": lambda: [
        *_of_labels(F.cross_entropy),
        *_of_labels(F.cross_entropy, label_smoothing=0.3),
    ],
    "nn_functional_nll_loss": lambda: _of_labels(F.nll_loss),
    "nn_functional_binary_cross_entropy": lambda: _weighted(
        F.binary_cross_entropy, _probability(), _probability().flip(0)
    ),
    "nn_functional_binary_cross_entropy_with_logits": lambda: _weighted(
        F.binary_cross_entropy_with_logits, _drawn(ROWS, 6), _probability()
    ),
    "nn_functional_multi_margin_loss": lambda: [
        Sample(F.multi_margin_loss, (_drawn(ROWS, CLASSES), _labels(ROWS)), {"weight": w})
        for w in (None, _weights(CLASSES))
    ],
    "nn_functional_multilabel_soft_margin_loss": lambda: [
        Sample(
            F.multilabel_soft_margin_loss,
            (_drawn(ROWS, CLASSES), (_drawn(ROWS, CLASSES) > 0).double()),
            {"weight": _weights(CLASSES)},
        )
    ],
    "nn_functional_embedding": _embedded,
    "nn_functional_embedding_bag": _padded,
    "nn_functional_ctc_loss": _sequences,
    "nn_functional_avg_pool2d": _pooled,
    "nanmean": lambda: _reduced(torch.nanmean),
    "nansum": lambda: _reduced(torch.nansum),
    "count_nonzero": lambda: [Sample(torch.count_nonzero, (_labels(ROWS, 4),), {})],
    "masked_fill": lambda: [
        Sample(
            lambda x, m: x.masked_fill(m, 0.0).sum() / (~m).sum(),
            (_drawn(ROWS, 4), _labels(ROWS, 4) == IGNORED),
            {},
        )
    ],
    "masked_select": lambda: [
        Sample(
            lambda x, m: x.masked_select(m).mean(),
            (_drawn(ROWS, 4), _labels(ROWS, 4) != IGNORED),
            {},
        )
    ],
}
