#!/usr/bin/env python
"""How long does a model that ``fully_shard`` shards take to trace, beside the same model as it is?

    python tools/bench/tracing_fsdp2.py [--blocks 6] [--rounds 3] [--beside CHECKOUT] [--write FILE]

Blocks of nine parameters each, on a fake group of 8 ranks: CPU seconds of the first call, by Dynamo alone
(backend ``eager``) and with AOTAutograd (``aot_eager``), each in a process of its own, the smallest of the
rounds, which take turns. ``gather_ms`` is what the sharded model takes longer, a parameter. ``--beside`` measures another
checkout of this project in the same run. Absolute times are this machine's; ratios are the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

ROOT = Path(__file__).parents[2]
BACKENDS = ("eager", "aot_eager")
WIDTH = 64


class Block(nn.Module):
    """Attention and a gated linear unit; x [batch, sequence, WIDTH] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.o(scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        h = self.between(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


def first_call_s(blocks: int, backend: str, sharded: bool) -> float:
    """CPU seconds of the first call in this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import dynamo_dist

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (8,))
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    if sharded:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    dynamo_dist.enable()
    # What a process compiles first loads torch's compiler; that is not measured.
    # A function of this file: modules and functions of torch share a frame, whose sizes would become dynamic.
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(1, requires_grad=True)).backward()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 16, WIDTH)
    start = time.process_time()
    compiled(x)
    return time.process_time() - start


def measured(checkout: Path, blocks: int, backend: str, sharded: bool) -> float:
    """``first_call_s`` in a process that takes the packages from ``checkout``."""
    command = [sys.executable, __file__, "--blocks", str(blocks), "--child", backend]
    done = subprocess.run(
        [*command, *(["--sharded"] if sharded else [])],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--write", type=Path, help="a JSON file for the result")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(first_call_s(options.blocks, options.child, options.sharded))
        return 0

    trees = {"this": ROOT, **({"beside": options.beside} if options.beside else {})}
    cases = [(b, t, s) for b in BACKENDS for t in trees for s in (True, False)]
    times: dict[tuple[str, str, bool], float] = {}
    for _ in range(options.rounds):
        for case in cases:
            backend, tree, sharded = case
            took = measured(trees[tree], options.blocks, backend, sharded)
            times[case] = min(took, times.get(case, took))
    parameters = options.blocks * 9
    found: dict[str, object] = {
        "kind": "measured, CPU time, fake group of 8 ranks",
        "torch": torch.__version__,
        "parameters": parameters,
        "rounds": options.rounds,
    }
    for tree in trees:
        for backend in BACKENDS:
            sharded, whole = times[backend, tree, True], times[backend, tree, False]
            found[f"{tree}, {backend}"] = {
                "sharded_s": round(sharded, 3),
                "as_it_is_s": round(whole, 3),
                "ratio": round(sharded / whole, 3),
                "gather_ms": round(1e3 * (sharded - whole) / parameters, 2),
            }
    if options.beside:
        for backend in BACKENDS:
            ratio = times[backend, "this", True] / times[backend, "beside", True]
            found[f"this to beside, {backend}"] = round(ratio, 3)
    print(json.dumps(found, indent=1))
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
