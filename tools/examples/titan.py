"""A Llama-3 as torchtitan writes it, on a mesh of dp x tp: torchrun --nproc-per-node 4
tools/examples/titan.py

Tensor and sequence parallel by ``parallelize_module``, each block checkpointed, then
``fully_shard``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shown import leave, show
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, LENGTH = 128, 8, 2, 256, 4, 64


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x`` [batch, heads, length, features]."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the weights that this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Llama(nn.Module):
    """Tokens [batch, length] to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel(model: Llama, mesh: dist.DeviceMesh) -> None:
    """torchtitan's plan: between blocks activations are sharded on the sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
        plan |= {name: ColwiseParallel() for name in ("feed.gate", "feed.up")}
        plan |= {
            name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "feed.down")
        }
        plan |= {name: SequenceParallel() for name in ("attention_norm", "feed_norm")}
        plan |= {"attention": gathered, "feed": gathered}
        parallelize_module(block, mesh, plan)
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)


def main() -> None:
    """Build, shard, compare."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Llama()
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(1 + mesh.get_local_rank("dp"))  # each data parallel rank its own batch
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    leave(show(model, tokens[:, :-1], "torchtitan-style Llama, dp x tp", loss=loss))


if __name__ == "__main__":
    main()
