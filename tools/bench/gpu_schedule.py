"""What does the schedule hide on a GPU? Training steps on one, beside collectives that are paced
copies.

Layers of a Llama 3 8B block, their weights in eight shards: a gather for each weight, a
reduce-scatter for each gradient. Kernels and streams are real, links are modelled
(``cuda_timed_group.py``). Variants: upstream Inductor, upstream with its opt-in reordering, and
ours, with a topology whose links are those of the run; at links that take half as long as all
compute, as long, and twice as long. They take turns. Two ways to copy: by 16 multiprocessors, which
compute then misses, and by a copy engine.

usage: gpu_schedule.py [--out FILE] [--small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from cuda_timed_group import Link, cuda_timed_group, link
from gpu_timing import idle_kernel
from rescale import write_rescaled

import inductor_passes
from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.topology import Topology
from inductor_passes.report import recorder

WORLD = 8
BASE = "h100x8"
LOADS = (0.5, 1.0, 2.0)  # link time of all collectives over the compute time of the step
UPSTREAM_REORDER = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
WARM_UP = 2
Step = Callable[[], None]


class Sizes:
    """Llama 3 8B's, or small ones."""

    def __init__(self, small: bool = False) -> None:
        self.layers, self.tokens = (2, 128) if small else (5, 4096)
        self.width, self.ffn, self.heads = (256, 512, 4) if small else (4096, 14336, 32)

    def shapes(self) -> list[tuple[int, int]]:
        """Of one layer's weights, whole: QKV (eight key heads in 32), output, gate and up, down."""
        keys = self.width // 4
        return [
            (self.width, self.width + 2 * keys),
            (self.width, self.width),
            (self.width, 2 * self.ffn),
            (self.ffn, self.width),
        ]


def loss(x: torch.Tensor, shards: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Fully sharded layers; ``x`` ``[tokens, width]``, four shards a layer."""
    width = x.shape[1]
    head = width // heads

    def whole(shard: torch.Tensor) -> torch.Tensor:
        return fc.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)

    for first in range(0, len(shards), 4):
        qkv, out, up, down = shards[first : first + 4]
        y = F.rms_norm(x, (width,)) @ whole(qkv)
        q, k, v = y.split([width, width // 4, width // 4], dim=1)
        k, v = (t.view(-1, heads // 4, head).repeat_interleave(4, dim=1) for t in (k, v))
        q, k, v = (t.reshape(1, -1, heads, head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape) @ whole(out)
        gate, up = (F.rms_norm(x, (width,)) @ whole(up)).chunk(2, dim=1)
        x = x + (F.silu(gate) * up) @ whole(down)
    return x.float().square().mean()


def measure_schedule(small: bool = False, rounds: int = 5) -> dict[str, Any]:
    """Milliseconds of a step of each variant at each link, and how much of the link is hidden."""
    sizes = Sizes(small)
    with cuda_timed_group(WORLD), tempfile.TemporaryDirectory() as work:
        return _measure(sizes, rounds, Path(work))


def _measure(sizes: Sizes, rounds: int, work: Path) -> dict[str, Any]:
    with recorder.records_of_block() as records:
        free = step_of(sizes, {"schedule": "off", "disable": ["pin_order"], "topology": BASE})
    modelled_us = sum(record.before.compute_us for record in records)
    link_us = sum(record.before.communication_us for record in records)
    host_ms = _host_ms(free)
    with link(lambda *_: 0.0, "none"):
        alone_us = 1e3 * statistics.median(timed(free, host_ms) for _ in range(rounds))
    steps = {"upstream": step_of(sizes, None), "upstream reorder": step_of(sizes, UPSTREAM_REORDER)}
    runs: list[tuple[float, str, str, Step, Topology]] = []
    predicted: dict[tuple[float, str], float] = {}
    for load in LOADS:
        path = work / f"{load}.json"
        write_rescaled(
            BASE,
            path,
            name=f"paced-{load}",
            compute=alone_us / modelled_us,
            links=load * alone_us / link_us,
        )
        topology = load_topology(path)
        with recorder.records_of_block() as records:
            ours = step_of(sizes, {"topology": str(path)})
        predicted[load, "ours"] = sum(record.after.makespan_us for record in records) / 1e3
        predicted[load, "upstream"] = sum(record.before.makespan_us for record in records) / 1e3
        for variant, step in (*steps.items(), ("ours", ours)):
            for copies in ("programs", "engine"):
                runs.append((load, variant, copies, step, topology))
    taken: dict[tuple[float, str, str], list[float]] = {run[:3]: [] for run in runs}
    alone: dict[tuple[float, str, str], list[float]] = {run[:3]: [] for run in runs}
    totals = {}
    for _ in range(rounds):
        for *which, step, topology in runs:
            key = (which[0], which[1], which[2])
            # Beside each other: a chip under load is slower from step to step.
            with link(lambda *_: 0.0, "none"):
                alone[key].append(timed(step, host_ms))
            with link(link_of(topology), key[2]):
                taken[key].append(timed(step, host_ms))
                totals[key] = Link.total_us / 1e3
    rows = []
    for key, found in taken.items():
        step_ms, compute = statistics.median(found), statistics.median(alone[key])
        rows.append(
            {
                "link_over_compute": key[0],
                "copies": key[2],
                "variant": key[1],
                "step_ms": step_ms,
                "compute_ms": compute,
                "link_ms": totals[key],
                **figures(step_ms, compute, totals[key]),
                "predicted_ms": predicted.get(key[:2]),
            }
        )
    return {
        "label": "real kernels and streams of one GPU, modelled links",
        "program": (
            f"{sizes.layers} layers of width {sizes.width}, {sizes.tokens} tokens, {WORLD} "
            "shards, trained"
        ),
        "host_ms": host_ms,
        "rows": rows,
    }


def figures(step: float, compute: float, link_time: float) -> dict[str, float]:
    """How near a step is to the longer of its two parts, and which share of the shorter is
    hidden.
    """
    shorter = min(compute, link_time)
    return {
        "over_longer": step / max(compute, link_time),
        "hidden_share": (compute + link_time - step) / shorter if shorter > 0 else 1.0,
    }


def step_of(sizes: Sizes, options: dict[str, Any] | None) -> Step:
    """One training step, compiled by upstream or, with options of ours, by us; warmed up."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    place = torch.device("cuda")
    x = torch.randn(sizes.tokens, sizes.width, device=place, dtype=torch.bfloat16)
    shards = [
        (torch.randn(rows // WORLD, cols, device=place) / rows**0.5).bfloat16().requires_grad_()
        for _ in range(sizes.layers)
        for rows, cols in sizes.shapes()
    ]
    own = options is not None and "topology" in options
    compiled = torch.compile(
        loss, fullgraph=True, options=inductor_passes.options(options) if own else options
    )

    def step() -> None:
        compiled(x, shards, sizes.heads).backward()
        for shard in shards:
            shard.grad = None

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return step


def _host_ms(step: Step) -> float:
    """How long the host takes to enqueue a step."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(found)


def timed(step: Step, host_ms: float) -> float:
    """Milliseconds of one step on the device, which idles until the host has enqueued all of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    idle_kernel[(1,)](int(2e6 * host_ms))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def link_of(topology: Topology) -> Callable[..., float]:
    """The link time that the cost model of this topology has."""

    def us(kind: str, payloads: list[int], ranks: tuple[int, ...]) -> float:
        shape = GroupShape(len(ranks), 1)
        return sum(collective_us(kind, payload, shape, topology) for payload in payloads)

    return us


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true", help="sizes for a try")
    arguments = parser.parse_args()
    found = measure_schedule(arguments.small)
    for row in found["rows"]:
        print(
            f"{row['link_over_compute']:.1f} {row['copies']:8} {row['variant']:13} step "
            f"{row['step_ms']:.2f} ms, compute {row['compute_ms']:.2f}, link "
            f"{row['link_ms']:.2f}: {row['over_longer']:.3f} of the longer, "
            f"{row['hidden_share']:.2f} hidden, predicted {row['predicted_ms'] or 0:.2f}",
            flush=True,
        )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
