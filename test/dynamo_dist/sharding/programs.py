"""Calls that upstream gets wrong or refuses, with the layouts in which it does."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

R, P, S0, S1, S2, S3 = Replicate(), Partial(), *map(Shard, range(4))


def drawn(*shape):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


def unit(*shape):
    return drawn(*shape).sigmoid()


def signs(*shape):
    return drawn(*shape).sign().long()


X, Y = drawn(6, 5), drawn(6, 7)[:, :5].contiguous()
IMAGE, FILTERS, BIAS = drawn(4, 4, 8, 8), drawn(8, 4, 3, 3), drawn(8)

# name -> function, its tensors, and layouts to try them in: one placement a tensor on a mesh of
# four.
PROGRAMS = {
    **{
        f"{loss.__name__} {reduction}": (
            lambda x, y, loss=loss, reduction=reduction: loss(x, y, reduction=reduction),
            (left, right),
            ((S0, S0), (S1, S1), (S0, R), (P, S1)),
        )
        for loss, left, right in (
            (F.mse_loss, X, Y),
            (F.smooth_l1_loss, X, Y),
            (F.huber_loss, X, Y),
            (F.l1_loss, X, Y),
            (F.binary_cross_entropy, unit(6, 5), unit(5, 6).t().contiguous()),
            (F.binary_cross_entropy_with_logits, X, unit(6, 5)),
            (F.soft_margin_loss, X, signs(6, 5)),
            (F.kl_div, X.log_softmax(1), unit(6, 5)),
        )
        for reduction in ("mean", "sum", "none")
    },
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (IMAGE, FILTERS, BIAS),
        ((S0, R, R), (R, S0, S0), (S1, S1, R), (S2, R, R), (S3, R, R), (P, R, R), (R, P, P)),
    ),
    "conv2d, strided": (
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2),
        (IMAGE, FILTERS),
        ((S0, R), (R, S0), (S1, R), (S3, R), (S2, S0)),
    ),
    "conv2d, groups": (
        lambda x, w: F.conv2d(x, w, groups=2),
        (IMAGE, drawn(8, 2, 3, 3)),
        ((S0, R), (R, S0), (S1, R)),
    ),
    "conv1d": (
        lambda x, w: F.conv1d(x, w, padding=1),
        (drawn(4, 4, 9), drawn(4, 4, 3)),
        ((S2, R), (S0, R), (S1, S1)),
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        (IMAGE, drawn(4, 8, 3, 3), BIAS),
        ((S0, R, R), (R, S1, S0), (S1, S0, R), (S2, R, R), (S3, R, R)),
    ),
    "norm of minus infinity": (
        lambda x: torch.linalg.vector_norm(x, -torch.inf, dim=1),
        (X,),
        ((S0,), (S1,), (P,)),
    ),
    "maximum of uneven shards": (lambda x: x.max(), (drawn(5, 3),), ((S0,), (S1,), (P,))),
    "mean of uneven shards": (lambda x: x.mean(), (drawn(5, 3),), ((S0,), (S1,), (P,))),
    "sum over no dimensions": (
        lambda x: x.sum([], keepdim=True),
        (drawn(5, 3),),
        ((S0,), (S1,)),
    ),
    "written to": (
        lambda x, y: (x * 1).add_(y).mul_(2),
        (X, Y),
        ((P, R), (S0, S0), (P, P), (S0, R)),
    ),
    "filled": (lambda x: (x * 1).fill_(3.0), (X,), ((P,), (S0,))),
    "whole numbers filled": (lambda x: (x * 1).fill_(3), (signs(6, 5),), ((P,), (S0,))),
    "whole numbers added to": (lambda x: (x * 9).add_(1), (signs(6, 5),), ((P,), (S0,))),
    "select from the back": (lambda x: x.select(-1, 2), (X,), ((S0,), (S1,))),
    "gated": (lambda x: F.glu(x, 0), (X,), ((S0,), (S1,), (P,))),
    "cummax": (lambda x: x.cummax(0)[0], (X,), ((S0,), (S1,))),
    "prelu": (F.prelu, (X, drawn(5)), ((S0, R), (S1, S0), (S1, R))),
    "hardswish": (F.hardswish, (X,), ((S0,), (P,))),
    "average pool": (
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        (IMAGE,),
        ((S0,), (S1,), (S2,), (P,)),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,), ((S0,), (S1,), (S3,), (P,))),
    "adaptive pools": (
        lambda x: F.adaptive_avg_pool2d(x, 3) + F.adaptive_max_pool2d(x, 3),
        (IMAGE,),
        ((S0,), (S1,), (S2,)),
    ),
    "reflection pad": (
        lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
        (IMAGE,),
        ((S0,), (S1,), (S3,), (P,)),
    ),
    "replication pad": (
        lambda x: F.pad(x, (1, 2), mode="replicate"),
        (drawn(4, 4, 9),),
        ((S0,), (S2,)),
    ),
    "unfold": (lambda x: F.unfold(x, 3), (IMAGE,), ((S0,), (S1,), (S2,))),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (IMAGE,),
        ((S0,), (S1,), (S2,)),
    ),
    **{
        f"gather of {tuple(index.shape)} along {dim}": (
            lambda x, i, dim=dim: torch.gather(x, dim, i),
            (drawn(8, 6), index),
            ((S0, R), (S1, R), (S0, S0), (S1, S0), (S0, S1), (S1, S1), (R, S0), (P, R)),
        )
        for dim, index in (
            (1, torch.tensor([[5], [0], [3], [2], [1], [4], [0], [5]])),
            (-1, torch.tensor([[5, 1], [0, 0], [3, 2], [2, 5]])),
            (0, torch.tensor([[7, 0, 3, 2, 5, 4]])),
        )
    },
    "two pending gathers": (
        lambda x, i, j: torch.gather(x, 1, i) * 2 - torch.gather(x, 1, j),
        (
            drawn(8, 6),
            torch.arange(8).remainder(6)[:, None],
            torch.arange(8).floor_divide(2)[:, None],
        ),
        ((S1, R, R), (S1, S0, R)),
    ),
    "cdist": (torch.cdist, (drawn(6, 3), drawn(5, 3)), ((S0, R), (R, S0), (S1, S1))),
    "conjugated": (
        lambda x, y: (torch.complex(x, -x).conj() @ torch.complex(y, y).conj()).imag,
        (X, drawn(5, 4)),
        ((S0, R), (S1, S0), (S0, S1), (R, S0), (P, S0)),
    ),
    "written to by a conjugate": (
        lambda x, y: torch.complex(x, x).clone().copy_(torch.complex(y, y).conj()).imag,
        (X, Y),
        ((R, S0), (S0, S1), (S1, R)),
    ),
    "polar": (lambda x, y: torch.polar(x.exp(), y).imag, (X, Y), ((S0, S0), (S1, R), (P, S0))),
    "half a transform": (lambda x: torch.fft.ihfft(x).real, (X,), ((S0,), (S1,), (P,))),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        (IMAGE,),
        ((S0,), (S1,), (S2,)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (drawn(4, 4, 6, 8), drawn(4, 4, 7, 8), drawn(4, 4, 7, 8)),
        ((S0, S0, S0), (S1, S1, S1), (S2, R, R), (R, S2, S2)),
    ),
    "attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (drawn(4, 4, 6, 8), drawn(4, 4, 7, 8), drawn(4, 4, 7, 8)),
        ((S0, S0, S0), (S2, R, R), (S2, S2, S2)),
    ),
    **{
        f"attention, mask of {tuple(mask.shape)}": (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.detach()),
            (drawn(4, 4, 8, 8), drawn(4, 4, 7, 8), drawn(4, 4, 7, 8), mask),
            ((S0, S0, S0, R), (S1, S1, S1, R), (S2, R, R, R)),
        )
        for mask in (drawn(8, 7) > 0, drawn(4, 1, 8, 7) > 0, drawn(1, 4, 1, 7) > 0)
    },
}
