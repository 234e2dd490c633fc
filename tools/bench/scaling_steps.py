"""Training steps of large models as one rank runs them, forward and backward, for ``scaling.py``.

Local shapes and explicit collectives: parameters sharded over the data-parallel group and gathered for
each use, in backward again (FSDP); Megatron's tensor parallel, with activations sharded on the sequence
between blocks (TP+SP); experts spread over ranks, tokens exchanged with all_to_all (EP). bfloat16, gradients
reduced in bfloat16. No optimizer, no embedding, no loss: layers alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx

from inductor_passes.testing import trace

LAYERS = 4
NODE = 8  # ranks that share NVLink
c10d = torch.ops._c10d_functional
Context = torch.autograd.function.FunctionCtx


@dataclass(frozen=True)
class Step:
    """A model's layer and how it is spread. ``tp``: tensor-parallel ranks; ``ep``: at most so many for experts.

    ``tokens``: of one sequence, one for each tensor-parallel group. ``latent``: ranks of DeepSeek's
    projections of queries, and of keys and values; ``active`` of ``experts`` see each token.
    """

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    tp: int = 1
    tokens: int = 8192
    head: int = 128
    ep: int = 1
    experts: int = 0
    active: int = 0
    latent: tuple[int, int] = (0, 0)


LLAMA = {
    "8B": Step(4096, 32, 8, 14336),
    "70B": Step(8192, 64, 8, 28672),
    "405B": Step(16384, 128, 8, 53248),
}
DEEPSEEK = Step(7168, 128, 128, 2048, tokens=4096, ep=64, experts=256, active=8, latent=(1536, 512))
STEPS = {
    **{f"Llama-3 {size}, FSDP": step for size, step in LLAMA.items()},
    **{
        f"Llama-3 {size}, FSDP + TP + SP": Step(s.hidden, s.heads, s.kv_heads, s.inner, tp=NODE)
        for size, s in LLAMA.items()
    },
    "DeepSeek-V3, FSDP + EP": DEEPSEEK,
}


@dataclass(frozen=True)
class Group:
    """A process group as collectives name it; of one rank, they do nothing."""

    name: str
    size: int

    @classmethod
    def of(cls, ranks: range) -> Group:
        """This rank, 0, and others."""
        if len(ranks) == dist.get_world_size():
            return cls(dist.group.WORLD.group_name, len(ranks))
        return cls(dist.new_group(list(ranks)).group_name, len(ranks))

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] -> [size * n, ...]"""
        return x if self.size < 2 else wait(c10d.all_gather_into_tensor(x, self.size, self.name))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """[size * n, ...] -> [n, ...]"""
        if self.size < 2:
            return x
        return wait(c10d.reduce_scatter_tensor(x, "sum", self.size, self.name))

    def exchange(self, x: Tensor) -> Tensor:
        """Equal shares of the rows to and from everyone."""
        if self.size < 2:
            return x
        rows = [x.shape[0] // self.size] * self.size
        return wait(c10d.all_to_all_single(x, rows, rows, self.name))


wait = c10d.wait_tensor


class Whole(torch.autograd.Function):
    """Rows gathered over a group; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple:
        return ctx.group.scatter_sum(grad.contiguous()), None


class Summed(torch.autograd.Function):
    """Partial sums added and scattered over a group; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.scatter_sum(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple:
        return ctx.group.gather(grad.contiguous()), None


class Exchanged(torch.autograd.Function):
    """Rows to and from the ranks of a group; the gradient goes back."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.exchange(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple:
        return ctx.group.exchange(grad.contiguous()), None


class Product(torch.autograd.Function):
    """x @ w, w gathered over a group from flat, padded shards, here and in backward again."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, shard: Tensor, shape: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.shape, ctx.group = shape, group
        return x @ whole(shard, shape, group)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple:
        x, shard = ctx.saved_tensors
        w = whole(shard, ctx.shape, ctx.group)
        of_w = (x.transpose(-2, -1) @ grad).flatten()
        padding = shard.numel() * ctx.group.size - of_w.numel()
        if padding:
            of_w = torch.nn.functional.pad(of_w, (0, padding))
        return grad @ w.transpose(-2, -1), ctx.group.scatter_sum(of_w), None, None


def whole(shard: Tensor, shape: tuple[int, ...], group: Group) -> Tensor:
    """The weight of which every rank has a part."""
    gathered = group.gather(shard)
    count = math.prod(shape)
    return (gathered[:count] if gathered.numel() > count else gathered).view(shape)


class Weights:
    """Shards, given out as they are asked for; ``sizes`` says of how many elements each is."""

    def __init__(self, given: list[Tensor] | None) -> None:
        self.given = None if given is None else list(given)
        self.sizes: list[list[int]] = []

    def product(self, x: Tensor, n: int, group: Group, experts: int = 0) -> Tensor:
        """x @ a weight of its width times ``n``, sharded over ``group``; one for each expert, or one."""
        shape = (experts, x.shape[-1], n) if experts else (x.shape[-1], n)
        self.sizes.append([math.ceil(math.prod(shape) / group.size)])
        if self.given is None:  # a first run finds out what is needed
            return x.new_empty((*x.shape[:-1], n))
        return Product.apply(x, self.given.pop(0), shape, group)


def trace_step(step: Step, world: int) -> fx.Graph:
    """Forward and backward of ``LAYERS`` layers on rank 0 of ``world``, as one graph of local tensors."""
    tp = Group.of(range(step.tp))
    dp = Group.of(range(0, world, step.tp))
    ep_size = min(step.ep, world)
    ep = Group.of(range(ep_size))
    replicas = Group.of(range(0, world, ep_size))
    rows = step.tokens // step.tp
    sizes: list[list[int]] = []

    def run(x: Tensor, *shards: Tensor) -> list[Tensor]:
        weights = Weights(list(shards) if sizes else None)
        y = x
        for _ in range(LAYERS):
            y = layer(step, y, weights, tp, dp, ep, replicas)
        sizes[:] = weights.sizes
        return list(torch.autograd.grad(y, [x, *shards], torch.ones_like(y))) if shards else [y]

    def training(x: Tensor, *shards: Tensor) -> list[Tensor]:
        return run(x.requires_grad_(), *(shard.requires_grad_() for shard in shards))

    x = [rows, step.hidden]
    trace(run, x, dtype=torch.bfloat16)
    graph = trace(training, x, *sizes, dtype=torch.bfloat16)
    graph.eliminate_dead_code()
    return graph


def layer(
    step: Step, x: Tensor, weights: Weights, tp: Group, dp: Group, ep: Group, replicas: Group
) -> Tensor:
    """Attention, then a dense block or experts, each behind a norm and with a residual."""
    y = Whole.apply(norm(x), tp)
    out = attention(step, y, weights, tp, dp)
    x = x + Summed.apply(weights.product(out, step.hidden, dp), tp)
    y = Whole.apply(norm(x), tp)
    inner = step.inner // tp.size
    dense = weights.product(gated(weights.product(y, 2 * inner, dp)), step.hidden, dp)
    if not step.experts:
        return x + Summed.apply(dense, tp)
    # Every token goes to ``active`` experts, evenly; the dense block is the shared expert.
    local = step.experts // ep.size
    sent = Exchanged.apply(y.repeat_interleave(step.active, 0), ep).view(local, -1, step.hidden)
    mixed = gated(weights.product(sent, 2 * step.inner, replicas, experts=local))
    mixed = weights.product(mixed, step.hidden, replicas, experts=local)
    back = Exchanged.apply(mixed.view(-1, step.hidden), ep)
    return x + dense + back.view(-1, step.active, step.hidden).sum(1)


def attention(step: Step, y: Tensor, weights: Weights, tp: Group, dp: Group) -> Tensor:
    """Causal attention of one sequence; [tokens, heads of this rank * head]."""
    heads, kv_heads = step.heads // tp.size, step.kv_heads // tp.size
    if step.latent[0]:
        q = weights.product(weights.product(y, step.latent[0], dp), heads * step.head, dp)
        kv = weights.product(y, step.latent[1], dp)
        k, v = weights.product(kv, 2 * kv_heads * step.head, dp).chunk(2, -1)
    else:
        widths = [heads * step.head, kv_heads * step.head, kv_heads * step.head]
        q, k, v = weights.product(y, sum(widths), dp).split(widths, -1)
    q, k, v = (t.reshape(1, step.tokens, -1, step.head).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return out.transpose(1, 2).reshape(step.tokens, -1)


def gated(x: Tensor) -> Tensor:
    """SwiGLU of the two halves."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
