"""Question: how many collectives does a training step launch, in eager mode and compiled? DDP and FSDP2, heads that divide and not.

    python tools/bench/launch_counts.py --write tools/bench/results/launch_counts.json

A Llama-like model of four narrow layers on two gloo ranks. torch.profiler counts what c10d is asked for in the third step of rank 0;
nothing is timed. Graphs are scheduled for each machine of ``--topologies``: what a start of a collective costs there must not decide
whether averages are bucketed at all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from preloaded import run_ranks

import dynamo_dist

RANKS = 2
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 128
CLASSES = (3, 4)
PARALLEL = ("ddp", "fsdp2")


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


def sharded(parallel: str, classes: int) -> nn.Module:
    """The same model on all ranks, under DDP or FSDP2."""
    torch.manual_seed(0)
    model = Model(classes)
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def launches(step: Any, steps: int = 3) -> dict[str, int]:
    """What c10d is asked for in the last of some steps, by name; waits and barriers left out."""
    for _ in range(steps - 1):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    names = (event.name for event in seen.events() if event.name.startswith("c10d::"))
    kinds = (name.removeprefix("c10d::").strip("_") for name in names)
    return dict(sorted(Counter(each for each in kinds if each != "barrier").items()))


def of_rank(parallel: str, classes: int, variant: str, out: Path) -> None:
    """Count on this rank, in eager mode or compiled for a topology; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(0, VOCABULARY, (8, 128))
    model = sharded(parallel, classes)
    call: Any = model
    if variant != "eager":
        dynamo_dist.enable()
        call = torch.compile(model, backend="dynamo_dist", options={"topology": variant})

    def step() -> None:
        model.zero_grad()
        call(tokens).square().mean().backward()

    found = launches(step)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"launches": sum(found.values()), **found}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start a job for each case, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--topologies", nargs="+", default=["cpu-gloo"])
    parser.add_argument("--of-rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of_rank:
        parallel, classes, variant, out = given.of_rank
        of_rank(parallel, int(classes), variant, Path(out))
        return 0
    rows = []
    for parallel, classes in itertools.product(PARALLEL, CLASSES):
        row: dict[str, Any] = {"parallel": parallel, "classes": classes}
        for variant in ("eager", *given.topologies):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "found.json"
                arguments = ("--of-rank", parallel, str(classes), variant, str(out))
                well, said = run_ranks(
                    Path(__file__), RANKS, arguments, folder=Path(folder), timeout_s=300
                )
                if not well:
                    print(said, file=sys.stderr)
                    return 1
                row[variant] = json.loads(out.read_text())
            print(f"{parallel}, {classes} classes, {variant}: {row[variant]}", flush=True)
        rows.append(row)
    if given.write:
        result = {"question": __doc__.split("\n")[0], "torch": torch.__version__, "rows": rows}
        given.write.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
