"""Functions of DTensors in every layout, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from comparison.program import draw, on_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

_LABELS = (3, 0, -100, 5, 1, -100, -100, 2)


def _labels(like):
    """Class of each row; ranks' parts have different numbers of them."""
    labels = torch.tensor(_LABELS)
    if not isinstance(like, DTensor):
        return labels
    rows = [p if p == Shard(0) else Replicate() for p in like.placements]
    return _laid_out(labels, like.device_mesh, rows)


def _laid_out(whole, mesh, placements):
    """``whole`` so laid out; a partial sum's parts differ from rank to rank."""
    if any(isinstance(p, Partial) for p in placements):
        rank = mesh.get_local_rank()
        part = whole * (rank + 1) / sum(range(1, mesh.size() + 1))
        return DTensor.from_local(part, mesh, placements, run_check=False)
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements).detach()


def _like(x, whole):
    """A replicated value where ``x`` is a DTensor."""
    if not isinstance(x, DTensor):
        return whole
    return DTensor.from_local(
        whole, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False
    )


_WEIGHT = torch.tensor([0.1, 2.0, 0.7, 3.0, 0.2, 1.0, 0.5, 0.9])
FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, _labels(x).clamp(min=0)),
    "cross_entropy_ignored": lambda x: F.cross_entropy(x, _labels(x)),
    "cross_entropy_weighted": lambda x: F.cross_entropy(x, _labels(x), weight=_like(x, _WEIGHT)),
    "cross_entropy_smoothed": lambda x: F.cross_entropy(x, _labels(x), label_smoothing=0.1),
    "cross_entropy_sum": lambda x: F.cross_entropy(x, _labels(x), reduction="sum"),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, -1), _labels(x), weight=_like(x, _WEIGHT)),
    "kl": lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(x * 2, -1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(
        x, (x.detach() > 0).float(), pos_weight=_like(x, _WEIGHT)
    ),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2),
    "nanmean": lambda x: torch.where(x > 0.5, torch.nan, x).nanmean(),
    "nanmean_rows": lambda x: torch.where(x > 0.5, torch.nan, x).nanmean(0),
    "masked_mean": lambda x: (x * (x.detach() > 0)).sum() / (x.detach() > 0).sum(),
    "count": lambda x: (x.detach() > 0).count_nonzero() + x.sum() * 0,
    "any_all": lambda x: x.sum() * (x.detach() > 2).any() + (x.detach() > -9).all(),
    "gather_labels": lambda x: torch.gather(
        F.log_softmax(x, -1), 1, _labels(x).clamp(min=0)[:, None]
    ),
    "one_hot": lambda x: F.one_hot(_labels(x).clamp(min=0), 8) * x,
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2).sum(),
    "interpolate_size": lambda x: F.interpolate(x[None, None], size=(4, 4), mode="bilinear").sin(),
    "dropout_eval": lambda x: F.dropout(x, 0.5, training=False),
    "fill": lambda x: x.clone().fill_(3.0) + x,
    "zero": lambda x: x.clone().zero_() + x,
    "norm_squared": lambda x: torch.linalg.vector_norm(x).square(),
    "norm_in_place": lambda x: torch.linalg.vector_norm(x.detach()).square_() * x,
    "mean_in_place": lambda x: x.mean(0).add_(1).mul_(2),
    "clamped_sum": lambda x: x.sum(0).clamp_(min=0.1),
    "softmax": lambda x: F.softmax(x, 0) + F.softmax(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (8,), _like(x, _WEIGHT), _like(x, _WEIGHT)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=0) + F.normalize(x, dim=1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(1), dim=1),
    "cumulative": lambda x: x.cumsum(0) + x.cumprod(1) + x.logcumsumexp(0),
    "sorted": lambda x: x.sort(0).values + x.topk(8, 1).values,
    "medians": lambda x: x.median(0).values + x.amax(0) + x.quantile(0.5, dim=0),
    "moments": lambda x: x.var(0) + x.std(1) + x.var() + torch.logsumexp(x, 0),
    "indexed": lambda x: x[torch.tensor([0, 3, 5])] * x[:, 2:5].sum(),
    "index_put": lambda x: x.index_put(
        (_like(x, torch.tensor([0, 2])),), _like(x, torch.ones(2, 8)), accumulate=True
    ),
    "index_add": lambda x: x.index_add(
        0, _like(x, torch.tensor([0, 2])), _like(x, torch.ones(2, 8))
    ),
    "scattered": lambda x: x.scatter_add(1, x.detach().argsort(1), x),
    "masked": lambda x: x.masked_fill(x.detach() > 0, 0.5).tril().triu(-1),
    "selected": lambda x: x.masked_select(x.detach() > 0).sum(),
    "rolled": lambda x: x.roll(3, 0) + x.flip(0, 1) + x.rot90(),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "stacked": lambda x: torch.stack([x, x * 2]).sum(0) + torch.cat([x, x], 1)[:, :8],
    "split": lambda x: sum(p.sum() * i for i, p in enumerate(x.split(3, 0))),
    "reshaped": lambda x: x.reshape(4, 16).reshape(16, 4).t().reshape(-1).sin(),
    "products": lambda x: (x @ x.t()).relu() @ x,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x) + torch.outer(x[0], x[1]),
    "batched": lambda x: torch.bmm(x.view(2, 4, 8), x.view(2, 4, 8).transpose(1, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 2, 4, 8)] * 3, is_causal=True
    ),
    "embedding": lambda x: F.embedding(_labels(x).clamp(min=0), x),
    "embedding_bag": lambda x: F.embedding_bag(
        _like(x, torch.arange(8).view(2, 4)), x, mode="mean"
    ),
    "convolved": lambda x: F.conv1d(x[None], _like(x, torch.ones(4, 8, 3)), padding=1),
    "pooled": lambda x: F.avg_pool1d(x[None], 2) + F.max_pool1d(x[None], 2),
    "solved": lambda x: torch.linalg.inv(x @ x.t() + 8 * _like(x, torch.eye(8))),
    "decomposed": lambda x: torch.linalg.svdvals(x) + torch.linalg.qr(x).R.diagonal().abs(),
    "transformed": lambda x: torch.fft.fft(x).abs(),
    "distances": lambda x: torch.cdist(x, x * 2),
    "foreach": lambda x: sum(t.sum() for t in torch._foreach_mul([x, x * 2], 3.0)),
    "foreach_norm": lambda x: torch.stack(torch._foreach_norm([x, x * 2])).norm(),
    "lerped": lambda x: torch.lerp(x, x.flip(0), 0.3).addcmul(x, x, value=2),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.0) + torch.where(x > 0, 1.0, x),
    "complex": lambda x: torch.view_as_complex(x.view(8, 4, 2)).abs(),
    "bucketed": lambda x: torch.bucketize(x.detach(), _like(x, torch.tensor([-1.0, 0.0, 1.0]))) * x,
    "repeated": lambda x: x.repeat_interleave(2, 0).repeat(1, 2).expand(2, 16, 16).sum(0),
    "unfolded": lambda x: x.unfold(0, 4, 2).sum(-1),
    "narrowed": lambda x: x.narrow(0, 1, 5) * x.select(1, 2)[:5, None],
    "in_place_views": lambda x: _written(x),
    "detached_copy": lambda x: x.clone().copy_(x.flip(0)) + x.detach().neg_(),
    "prelu": lambda x: (
        F.prelu(x, _like(x, torch.tensor([0.3]))) + F.leaky_relu(x) + F.glu(x, 1).sum()
    ),
    "argmax": lambda x: x.argmax(1) + x.sum(1) * 0,
    "isin": lambda x: torch.isin(_labels(x), _like(x, torch.tensor([3, 5]))) * x.sum(),
    "trace": lambda x: x.trace() + x.diagonal().sum() + torch.diag_embed(x[0]).sum(),
    "histogram": lambda x: torch.histc(x.detach(), 4, -2, 2) + x.sum() * 0,
    "bincount": lambda x: torch.bincount(_labels(x).clamp(min=0), minlength=8) + x.sum() * 0,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "logits": lambda x: F.log_softmax(x.view(2, 4, 8), -1).view(8, 8).logsumexp(1),
}


def _written(x):
    y = x * 1
    y[:, 1:4].mul_(2)
    y.view(-1)[3:9].add_(1)
    return y


_LAYOUTS = {"S0": [Shard(0)], "S1": [Shard(1)], "R": [Replicate()], "P": [Partial()]}


def _trained(function, x):
    x = x.requires_grad_()
    out = function(x)
    if not out.requires_grad:
        return [out]
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    (grad,) = torch.autograd.grad(
        (whole * torch.linspace(0.5, 1.5, whole.numel()).view(whole.shape)).sum(), x
    )
    return [whole, grad]


def _register(name, function, layout):
    def run(given):
        x = draw(8, 8, dtype=torch.float64) / 2
        x = x.float()
        expected = _trained(function, x.clone())
        yield (
            _trained(
                given.compiled(lambda t: function(t)), _laid_out(x, given.mesh, _LAYOUTS[layout])
            ),
            expected,
        )

    run.__name__ = f"{name}_{layout}"
    on_mesh()(run)


for _name, _function in FUNCTIONS.items():
    for _layout in _LAYOUTS:
        _register(_name, _function, _layout)
