#!/usr/bin/env python
"""Question: how long do the passes take on a very large graph?

    python tools/bench/large_graph.py --nodes 215000 --json tools/bench/results/large_graph.json

A training step of decoder blocks with sharded parameters (one gather and one reduction each) and
SGD with momentum, traced on a fake group of eight ranks with fake tensors. Nothing is lowered and
nothing runs. Seconds are this machine's, of processor time, and by the clock for each pass;
``trace_seconds`` are torch's tracing of the step, for comparison.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import fx

from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_passes
from inductor_passes.testing import fake_group, trace

RANKS, WIDTH, ROWS = 8, 1024, 4096
PARAMETERS = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
NODES_OF_A_LAYER = 132


def block(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """A decoder block whose parameters are gathered when it needs them."""
    qkv, out, up, down = (funcol.all_gather_single_autograd(w, 0, "0") for w in shards)
    q, k, v = (F.rms_norm(x, (WIDTH,)) @ qkv).chunk(3, -1)
    x = x + (torch.softmax(q @ k.t(), -1) @ v) @ out
    return x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down


def training_step(layers: int) -> fx.Graph:
    """The graph of a whole step."""
    count = len(PARAMETERS)

    def step(x: torch.Tensor, *state: torch.Tensor) -> list[torch.Tensor]:
        shards = [each.detach().requires_grad_() for each in state[: count * layers]]
        momenta = state[count * layers :]
        for i in range(layers):
            x = block(x, shards[count * i :][:count])
        updated: list[torch.Tensor] = []
        for w, m, grad in zip(
            shards, momenta, torch.autograd.grad(x.square().mean(), shards), strict=True
        ):
            m = 0.9 * m + grad
            updated += [m, w.detach() - 0.1 * m]
        return updated

    shapes = [(rows // RANKS, columns) for rows, columns in PARAMETERS] * layers
    return trace(step, (ROWS, WIDTH), *shapes, *shapes)


def main() -> None:
    """Trace, run the passes, print seconds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=215_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = time.process_time()
    with fake_group(RANKS):
        graph = training_step(-(-options.nodes // NODES_OF_A_LAYER))
        traced = time.process_time()
        nodes = len(graph.nodes)
        record = run_passes(graph, PassOptions(topology="h100x8"))
    assert record is not None
    passed = time.process_time() - traced
    seconds = {each.name: round(each.seconds, 1) for each in record.passes if each.seconds >= 0.1}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "nodes": nodes,
        "trace_seconds": round(traced - start, 1),
        "passes_seconds": round(passed, 1),
        "by_pass_seconds": seconds,
        "makespan_over_before": round(record.after.makespan_us / record.before.makespan_us, 3),
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
