"""Question: is a pass in parts as much faster by the clock as the model says?

    python tools/bench/split_timed.py --out tools/bench/results/split_timed.json
    python tools/bench/split_timed.py --training --out tools/bench/results/split_timed_training.json

One process claims to be rank 0 of eight. Kernels are real, on one core; links are modelled: an
all_reduce takes its time on its group's channel and burns no processor time (timed_group.py). A
stack of Llama-like blocks, tensor parallel as Megatron has it, in inference or in training (forward
and backward), at three ratios of link time to compute. Baseline: our order of the whole graph. The
two take turns; ratios are within one round. The model's compute is scaled once, so that the step
without link time is as long as measured. Most of the time is Inductor's: in training there are two
blocks, and each variant is compiled once for a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(os.cpu_count()))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from rescale import write_rescaled
from timed_group import ThreadClock, WallClock, link_time, timed_group
from torch import Tensor

import inductor_passes
from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.topology import Topology
from inductor_passes.records import GraphRecord
from inductor_passes.report import recorder

WORLD, WARM_UP = 8, 2
BATCH, TOKENS, WIDTH, HEADS, INNER = 4, 128, 512, 4, 512
BLOCKS, TRAINED_BLOCKS = 4, 2
LOADS = (0.5, 1.0, 2.0)  # link time as a multiple of compute
SHAPES = [[WIDTH, 3 * WIDTH // 2], [WIDTH // 2, WIDTH], [WIDTH, 2 * INNER], [INNER, WIDTH]]


def summed(x: Tensor) -> Tensor:
    """The sum over the ranks."""
    return fc.wait_tensor(fc.all_reduce(x, "sum", dist.group.WORLD))


class Enter(torch.autograd.Function):
    """Nothing; the gradient is summed."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return summed(grad.contiguous())


class Leave(torch.autograd.Function):
    """A sum over ranks; the gradient is as it is."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    """The blocks of this rank: heads and columns are local."""
    for i in range(0, len(weights), len(SHAPES)):
        qkv, out, up, down = weights[i : i + len(SHAPES)]
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in (Enter.apply(norm(x)) @ qkv).chunk(3, -1)
        )
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Leave.apply(seen.transpose(1, 2).flatten(2) @ out)
        gate, value = (Enter.apply(norm(x)) @ up).chunk(2, -1)
        x = x + Leave.apply(torch.nn.functional.silu(gate) * value @ down)
    return x


def step_of(
    options: dict, training: bool, blocks: int
) -> tuple[Callable[[], None], list[GraphRecord]]:
    """One compiled pass, warmed up, and the records of its graphs."""
    start = time.perf_counter()
    torch.manual_seed(0)
    x = torch.rand(BATCH, TOKENS, WIDTH)
    ones = torch.ones_like(x)
    weights = [(torch.rand(shape) / WIDTH).requires_grad_(training) for shape in SHAPES * blocks]
    # A function of its own: Dynamo keeps few graphs of one.
    program = types.FunctionType(forward.__code__.replace(), forward.__globals__)
    compiled = torch.compile(program, fullgraph=True, options=inductor_passes.options(options))

    def step() -> None:
        if training:
            torch.autograd.grad(compiled(x, weights), weights, ones)
            return
        with torch.no_grad():
            compiled(x, weights)

    with recorder.records_of_block() as records:
        for _ in range(WARM_UP):
            step()
    took = time.perf_counter() - start
    print(f"{options}: compiled and warm in {took:.0f} s", file=sys.stderr, flush=True)
    return step, list(records)


def measure(rounds: int, work: Path, clock: WallClock, training: bool, blocks: int) -> dict:
    """Both at each ratio, in turn."""
    local = {"schedule": "off", "disable": ["pin_order"], "topology": "cpu-gloo"}
    _, records = step_of(local, training, blocks)
    predicted_us = sum(r.before.compute_us for r in records)
    link_us = sum(r.before.communication_us for r in records)
    free, _ = step_of({"schedule": "off", "topology": "cpu-gloo"}, training, blocks)
    measured_us = statistics.median(timed(free, clock) for _ in range(9))
    rows = []
    for load in LOADS:
        torch._dynamo.reset()
        factor = load * measured_us / link_us
        path = work / f"split{load}.json"
        write_rescaled(
            "cpu-gloo",
            path,
            name=f"split-{load}",
            compute=measured_us / predicted_us,
            links=factor,
        )
        content = json.loads(path.read_text())
        del content["device"]["launching_us"]  # modelled links burn no processor time
        path.write_text(json.dumps(content))
        whole, of_whole = step_of({"topology": str(path), "split": "off"}, training, blocks)
        parts, of_parts = step_of({"topology": str(path), "split": "auto"}, training, blocks)
        ratios, alone = [], []
        with link_time(link_of(load_topology(path))):
            for _ in range(rounds):
                took = timed(whole, clock)
                ratios.append(took / timed(parts, clock))
                alone.append(took)
        gain = statistics.median(ratios)
        predicted = sum(r.after.makespan_us for r in of_whole) / sum(
            r.after.makespan_us for r in of_parts
        )
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows.append(
            {
                "link_over_compute": load,
                "decision": [r.split.decision for r in of_parts if r.split is not None],
                "gain_measured": round(gain, 4),
                "quartiles": [round(low, 4), round(high, 4)],
                "gain_predicted": round(predicted, 4),
                "error": round(predicted / gain - 1, 4),
                "whole_over_step_without_link": round(statistics.median(alone) / measured_us, 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {"step_without_link_ms": round(measured_us / 1e3, 3), "rows": rows}


def timed(step: Callable[[], None], clock: WallClock) -> float:
    """Microseconds of one step."""
    start = clock.now()
    step()
    return 1e6 * (clock.now() - start)


def link_of(topology: Topology) -> Callable[..., float]:
    """The link time that the cost model of this topology has."""

    def us(kind: str, payloads: list[int], ranks: tuple[int, ...]) -> float:
        shape = GroupShape(len(ranks), 1)
        return sum(collective_us(kind, p, shape, topology) for p in payloads)

    return us


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("thread", "wall"), default="thread")
    parser.add_argument("--blocks", type=int, help=f"{BLOCKS}, or {TRAINED_BLOCKS} in training")
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    blocks = options.blocks or (TRAINED_BLOCKS if options.training else BLOCKS)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    clocks = {"thread": ThreadClock, "wall": WallClock}
    with (
        timed_group(
            WORLD, lambda kind, payloads, ranks: 0.0, clock=clocks[options.clock]()
        ) as clock,
        tempfile.TemporaryDirectory() as work,
    ):
        found = measure(options.rounds, Path(work), clock, options.training, blocks)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/split_timed.py"
            + (" --training" if options.training else ""),
            "kind": (
                "real kernels on one core, modelled links; time of the computing thread plus what "
                "it waits"
            ),
            "torch": torch.__version__,
            "blocks": blocks,
            **found,
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
