"""Attention

``flex_attention`` and ``scaled_dot_product_attention`` on DTensors, and ``context_parallel``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from comparison.row import drawn, laid_out, row
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_SHAPE = (2, 2, 128, 16)


def _causal(b, h, q, k):
    return q >= k


def _qkv(mesh, placement, grad):
    return [laid_out(mesh, [placement], *_SHAPE, seed=s, grad=grad) for s in range(3)]


@row(trained=False, backend="traced")
def flex_heads(mesh, rank):
    """``flex_attention``, heads sharded."""
    return lambda q, k, v: flex_attention(q, k, v), tuple(_qkv(mesh, Shard(1), False))


@row(trained=False, backend="traced")
def flex_batch(mesh, rank):
    """``flex_attention``, batch sharded."""
    return lambda q, k, v: flex_attention(q, k, v), tuple(_qkv(mesh, Shard(0), False))


@row(trained=False, backend="traced")
def flex_scored(mesh, rank):
    """A score of the head's index, heads sharded."""

    def score(s, b, h, q, k):
        return s + h * 0.5 + (q - k) * 0.01

    return (
        lambda q, k, v: flex_attention(q, k, v, score_mod=score),
        tuple(_qkv(mesh, Shard(1), False)),
    )


@row(trained=False, backend="traced")
def flex_masked_heads(mesh, rank):
    """A causal block mask, the same on all ranks; heads sharded."""
    mask = create_block_mask(_causal, None, None, 128, 128, device="cpu")
    return (
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask),
        tuple(_qkv(mesh, Shard(1), False)),
    )


@row(trained=False, backend="traced")
def flex_masked_batch(mesh, rank):
    """A block mask made per shard of the batch."""
    lengths = torch.tensor([100, 40])

    def document(b, h, q, k):
        return (q >= k) & (k < lengths[rank])

    mask = create_block_mask(document, 1, None, 128, 128, device="cpu")

    def f(q, k, v):
        local = [each.to_local() for each in (q, k, v)]
        return flex_attention(*local, block_mask=mask)

    return f, tuple(_qkv(mesh, Shard(0), False))


@row(backend="traced")
def flex_trained(mesh, rank):
    """``flex_attention`` on DTensors with gradients, which torch has on CUDA alone."""
    return lambda q, k, v: flex_attention(q, k, v), tuple(_qkv(mesh, Shard(1), True))


@row()
def attention_heads(mesh, rank):
    """``scaled_dot_product_attention``, causal, heads sharded, trained."""
    return (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tuple(_qkv(mesh, Shard(1), True)),
    )


@row(truth="plugin")
def attention_batch(mesh, rank):
    """The same, batch sharded, with a mask."""

    def f(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = laid_out(mesh, [Replicate()], 128, 128, seed=5, grad=False)
    return f, (*_qkv(mesh, Shard(0), True), mask)


@row(truth="plugin")
def attention_of_groups(mesh, rank):
    """Fewer heads of keys than of queries, heads sharded."""
    q = laid_out(mesh, [Shard(1)], 2, 4, 16, 8)
    k, v = (laid_out(mesh, [Shard(1)], 2, 2, 16, 8, seed=s) for s in (1, 2))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (q, k, v)


@row(truth="plugin")
def attention_sequence(mesh, rank):
    """Queries sharded along the sequence, keys and values gathered."""

    def f(q, k, v):
        k, v = (each.redistribute(placements=[Replicate()]) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    return f, tuple(_qkv(mesh, Shard(2), True))


def _context(mesh, rank, causal):
    whole = [drawn(*_SHAPE, seed=s) for s in range(3)]

    def step(call, *qkv):
        q, k, v = (each.clone() for each in qkv)
        with (
            context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            return call(q, k, v)

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal) * 2

    return (f, step), tuple(whole)


def _rotating(method):
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


@row(trained=False, truth="plugin")
def context_parallel_ring(mesh, rank):
    """``context_parallel`` without a mask, by all-gather."""
    _rotating("allgather")
    return _context(mesh, rank, False)


@row(trained=False, truth="plugin")
def context_parallel_all_to_all(mesh, rank):
    """``context_parallel`` without a mask, by all-to-all."""
    _rotating("alltoall")
    return _context(mesh, rank, False)


@row(trained=False)
def context_parallel_causal(mesh, rank):
    """``context_parallel`` with a causal mask, by all-gather."""
    _rotating("allgather")
    return _context(mesh, rank, True)


@row(trained=False)
def context_parallel_causal_all_to_all(mesh, rank):
    """``context_parallel`` with a causal mask, by all-to-all."""
    _rotating("alltoall")
    return _context(mesh, rank, True)
