"""Question: what does a training step of 1, 4 or 8 micro-batches launch and send, in eager mode,
compiled by blocks, whole, and as a whole step?

    python tools/bench/traffic.py --write tools/bench/results/traffic.json

Real gloo ranks: two for DDP and FSDP2, four (two copies of two shards) for HSDP. All but the last
micro-batch run within ``no_sync()`` or ``set_requires_gradient_sync(False)``. Collectives and bytes
(what is gathered, or what is reduced) of the third step of rank 0; nothing is timed. "blocks" is
torch's own way: each block compiled by itself, the wrapper in eager mode. "step" is one graph of
all micro-batches. Graph passes run, kernels do not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "e2e" / "wrapped"))
from beside_eager import Launches
from preloaded import run_ranks

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only

RANKS = {"ddp": 2, "fsdp2": 2, "hsdp": 4}
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 128
HOW = ("eager", "blocks", "whole", "step")
OURS = ("whole", "step")
MICRO_BATCHES = (1, 4, 8)
STEPS = 3


class Block(nn.Module):
    """Attention and a gated MLP behind norms, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """An embedding, blocks and a head of some classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrapped(parallel: str, by_blocks: bool) -> nn.Module:
    """The same model on all ranks, under DDP, FSDP2 or HSDP."""
    torch.manual_seed(0)
    model = Model(4)
    if by_blocks:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    shape = (2, 2) if parallel == "hsdp" else (RANKS[parallel],)
    names = ("replicate", "shard") if parallel == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_rank(parallel: str, micro_batches: int, how: str, out: Path) -> None:
    """Count on this rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(0, VOCABULARY, (2, 32))
    if how in OURS:
        dynamo_dist.enable()
    model: Any = wrapped(parallel, how == "blocks")
    call: Any = torch.compile(model, backend="dynamo_dist") if how == "whole" else model

    def backwards(tokens: torch.Tensor) -> None:
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            waits = contextlib.nullcontext()
            if parallel == "ddp":
                waits = waits if is_last else model.no_sync()
            else:
                model.set_requires_gradient_sync(is_last)
            with waits:
                call(tokens).square().mean().backward()

    if how == "step":
        backwards = torch.compile(backwards, backend="dynamo_dist", fullgraph=True)
    with graph_passes_only() if how in OURS else contextlib.nullcontext():
        for step in range(STEPS):
            is_counted = step == STEPS - 1
            with Launches() if is_counted else contextlib.nullcontext() as seen:
                model.zero_grad()
                backwards(tokens)
    if dist.get_rank() == 0:
        kinds = {kind: [count, seen.bytes[kind]] for kind, count in sorted(seen.counts.items())}
        total = [sum(column) for column in zip(*kinds.values(), strict=True)]
        out.write_text(json.dumps({"launches": total[0], "bytes": total[1], "by_kind": kinds}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start a job for each case, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--of-rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of_rank:
        parallel, micro_batches, how, out = given.of_rank
        of_rank(parallel, int(micro_batches), how, Path(out))
        return 0
    rows = []
    for parallel, micro_batches in itertools.product(RANKS, MICRO_BATCHES):
        row: dict[str, Any] = {"parallel": parallel, "micro_batches": micro_batches}
        for how in HOW:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "found.json"
                arguments = ("--of-rank", parallel, str(micro_batches), how, str(out))
                well, said = run_ranks(
                    Path(__file__), RANKS[parallel], arguments, folder=Path(folder), timeout_s=300
                )
                if not well:
                    print(said, file=sys.stderr)
                    return 1
                row[how] = json.loads(out.read_text())
        told = ", ".join(f"{h} {row[h]['launches']} ({row[h]['bytes']:,} bytes)" for h in HOW)
        print(f"{parallel}, {micro_batches} micro-batches: {told}", flush=True)
        rows.append(row)
    if given.write:
        question = __doc__.split("\n\n")[0].replace("\n", " ")
        result = {"question": question, "torch": torch.__version__, "rows": rows}
        given.write.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
