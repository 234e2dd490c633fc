"""Question: do long jobs of many collectives in flight end well on gloo? HSDP on four ranks,
compiled whole.

    python tools/bench/soak.py --jobs 40 --json tools/bench/results/soak.json

Each job trains a small model for ``--steps`` steps on real ranks; a heap that gloo's threads spoil
ends a rank by a signal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "support"))
from preloaded import run_ranks

import dynamo_dist

RANKS, WIDTH = 4, 64


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(steps: int, blocks: int) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dynamo_dist.enable()
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="dynamo_dist", fullgraph=True)
    for step in range(steps):
        torch.manual_seed(step * RANKS + dist.get_rank())
        optimizer.zero_grad()
        compiled(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run the jobs one by one, print and write how many died, and of what."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--of-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of_rank:
        train(given.steps, given.blocks)
        return 0
    died: list[str] = []
    for number in range(given.jobs):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--of-rank", "--steps", str(given.steps), "--blocks", str(given.blocks)]
            well, said = run_ranks(
                Path(__file__), RANKS, arguments, folder=Path(folder), timeout_s=300, again=False
            )
        if not well:
            died.append(said[-2000:])
        print(f"job {number}: {'ended well' if well else said[-500:]}", flush=True)
    print(f"{len(died)} of {given.jobs} jobs died")
    if given.json:
        shown = {"torch": torch.__version__, **vars(given), "json": None, "died": died}
        del shown["json"], shown["of_rank"]
        given.json.write_text(json.dumps(shown, indent=1) + "\n")
    return bool(died)


if __name__ == "__main__":
    sys.exit(main())
