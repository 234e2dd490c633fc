"""A small model zoo on a fake process group: what the scheduler's test runs on every rank.

Each entry takes no argument and runs one step of its program, forward and backward, through
``compile``. Eight ranks; sizes are those of a small model, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, HIDDEN, BATCH, TOKENS, WORDS = 256, 8, 1024, 2, 128, 4096
Compile = Callable[[Callable[..., object]], Callable[..., object]]


class Attention(nn.Module):
    """Attention written with matrix products; head count from the local width."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (
            m(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1) @ v
        return self.o(a.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Embedding, layers, norm, head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def annotate(module: nn.Module, mesh: dist.DeviceMesh, placements: Callable[[str], list]) -> None:
    """Make every parameter a DTensor, placed by its path."""
    for path, parameter in list(module.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        spread = distribute_tensor(parameter.data, mesh, placements(path), src_data_rank=None)
        module.get_submodule(owner)._parameters[leaf] = nn.Parameter(spread)


def by_column_or_row(path: str) -> list:
    """Megatron's placements of the weights alone, on a one-dimensional mesh."""
    owner = path.removesuffix(".weight").rpartition(".")[2]
    if owner in ("q", "k", "v", "gate", "up", "head", "words"):
        return [Shard(0)]
    return [Shard(1)] if owner in ("o", "down") else [Replicate()]


def ids() -> torch.Tensor:
    """A batch of words."""
    return torch.zeros(BATCH, TOKENS, dtype=torch.long)


def tensor_parallel(compile_: Compile) -> None:
    """Tensor and sequence parallel by torch's own plan; cross entropy of float32 logits."""
    mesh = init_device_mesh("cpu", (8,))
    model = Decoder().bfloat16()
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    block = {
        "norm_1": SequenceParallel(),
        "attention": whole,
        "norm_2": SequenceParallel(),
        "mlp": whole,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )

    def loss(x: torch.Tensor, y: DTensor) -> DTensor:
        return F.cross_entropy(model(x).flatten(0, 1).float(), y)

    y = distribute_tensor(ids().flatten(), mesh, [Replicate()], src_data_rank=None)
    compile_(loss)(ids(), y).backward()


def weights_only(compile_: Compile, x_placement: object = None) -> None:
    """Only the weights are placed; upstream chooses the rest, op by op."""
    mesh = init_device_mesh("cpu", (8,))
    model = nn.Sequential(Block(), Block()).bfloat16()
    annotate(model, mesh, by_column_or_row)
    x = torch.zeros(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
    placed = distribute_tensor(x, mesh, [x_placement or Replicate()], src_data_rank=None)
    out = compile_(model)(placed.requires_grad_())
    out.redistribute(placements=[x_placement or Replicate()]).to_local().float().sum().backward()


def weights_only_sequence(compile_: Compile) -> None:
    """As ``weights_only``, with the input sharded on the sequence."""
    weights_only(compile_, Shard(1))


def sharded_data_parallel(compile_: Compile) -> None:
    """Float32 parameters sharded on their first dimension, gathered in the graph, used in
    bfloat16.
    """
    mesh = init_device_mesh("cpu", (8,))
    model = Decoder()
    annotate(model, mesh, lambda path: [Shard(0)])
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[DTensor], x: torch.Tensor) -> torch.Tensor:
        whole = {
            name: p.redistribute(placements=[Replicate()])
            .to_local(grad_placements=[Partial("avg")])
            .bfloat16()
            for name, p in zip(names, parameters, strict=True)
        }
        logits = torch.func.functional_call(model, whole, (x,))
        return logits.float().logsumexp(-1).mean()

    compile_(step)(list(model.parameters()), ids()).backward()


def hybrid(compile_: Compile) -> None:
    """2 x 4: batch on the first mesh dimension, Megatron's weights on the second, inference."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = Mlp().bfloat16()
    annotate(model, mesh, lambda path: [Replicate(), *by_column_or_row(path)])
    x = torch.zeros(8, TOKENS, WIDTH, dtype=torch.bfloat16)
    placed = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None)
    with torch.no_grad():
        compile_(lambda x: model(x).float().full_tensor())(placed)


def clip_gradients(compile_: Compile) -> None:
    """The norm of 24 gradients on a 2 x 4 mesh, each its own little all_reduce."""
    mesh = init_device_mesh("cpu", (2, 4))
    grads = [
        distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        for _ in range(24)
    ]

    def clip(grads: list[DTensor]) -> list[torch.Tensor]:
        squares = [(g * g).sum().full_tensor() for g in grads]
        scale = torch.rsqrt(torch.stack(squares).sum() + 1e-6).clamp(max=1.0)
        return [g.to_local() * scale for g in grads]

    compile_(clip)(grads)


def experts(compile_: Compile) -> None:
    """A dense mixture of 16 experts, two a rank, and a replicated router."""
    mesh = init_device_mesh("cpu", (8,))
    count = 16
    router = distribute_tensor(torch.zeros(WIDTH, count), mesh, [Replicate()], src_data_rank=None)
    up = distribute_tensor(torch.zeros(count, WIDTH, 512), mesh, [Shard(0)], src_data_rank=None)
    down = distribute_tensor(torch.zeros(count, 512, WIDTH), mesh, [Shard(0)], src_data_rank=None)
    x = distribute_tensor(torch.zeros(512, WIDTH), mesh, [Shard(0)], src_data_rank=None)

    def mixture(x: DTensor, router: DTensor, up: DTensor, down: DTensor) -> torch.Tensor:
        share = torch.softmax(x @ router, -1)
        each = torch.bmm(F.silu(torch.bmm(x.unsqueeze(0).expand(count, -1, -1), up)), down)
        return (each * share.t().unsqueeze(-1)).sum(0).redistribute(placements=[Shard(0)]).sum()

    weights = [w.requires_grad_() for w in (router, up, down)]
    compile_(lambda *args: mixture(*args).full_tensor())(x, *weights).backward()


def redistributes(compile_: Compile) -> None:
    """A transpose by way of the whole: Shard(0) to Replicate to Shard(1), and a sum cut the same
    way.
    """
    mesh = init_device_mesh("cpu", (8,))
    x = distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)], src_data_rank=None)

    def program(x: DTensor) -> tuple[torch.Tensor, ...]:
        columns = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)])
        gram = x.t() @ x
        rows = gram.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])
        return columns.to_local() * 2, rows.to_local() * 2

    with torch.no_grad():
        compile_(program)(x)


ZOO: dict[str, Callable[[Compile], None]] = {
    "tensor_parallel": tensor_parallel,
    "weights_only": weights_only,
    "weights_only_sequence": weights_only_sequence,
    "sharded_data_parallel": sharded_data_parallel,
    "hybrid": hybrid,
    "clip_gradients": clip_gradients,
    "experts": experts,
    "redistributes": redistributes,
}
