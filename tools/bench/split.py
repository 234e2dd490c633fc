"""Question: how much shorter is a step whose graph is cut into parts, and how far is it from the limit?

    python tools/bench/split.py --out tools/bench/results/split.json

Simulated, on h100x8, each graph on a fake group. "forward" and "training": four layers of Llama-3 8B, Megatron's tensor
parallel on 8 ranks, by batch; training is forward and backward in one graph. "post-grad": forward and backward graphs as Inductor
has them, of the tensor parallel program of ``zoo.py`` (sequence parallel, two layers) at that width. The others are training steps
of ``scaling_steps.py``, one sequence a group, on 64 ranks. "32 layers": the same programs at full depth, for what the choice costs:
``split_cpu_seconds`` is processor time of the pass, every number of parts tried, and the cut of the whole graph. Baseline: the same graph scheduled whole; "limit" is the larger of all
compute and the busiest channel by bytes alone, ``closed`` the share of the distance to it that the cut takes away. Makespans are
of the whole pipeline, cut or not; ``limit`` there is that of the whole uncut graph.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import zoo
from scaling_steps import STEPS, Context, trace_step
from torch import Tensor, fx
from torch.distributed import DeviceMesh

from inductor_passes import PassOptions, options
from inductor_passes.attach.capture import Captured, capturing
from inductor_passes.machine import TopologyCostModel, load_topology
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.schedule.graph.schedule import ScheduleGraph
from inductor_passes.schedule.model.limit import limit_us
from inductor_passes.split.joint import half_of
from inductor_passes.split.regions import SplitRegions
from inductor_passes.testing import fake_group, trace

TOPOLOGY, LAYERS, DEEP, RANKS, WORLD = "h100x8", 4, 32, 8, 64
COST = TopologyCostModel(load_topology(TOPOLOGY))
HIDDEN, HEADS, KV_HEADS, INNER, TOKENS, HEAD = 4096, 32, 8, 14336, 4096, 128
c10d, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def reduced(x: Tensor) -> Tensor:
    """The sum over the ranks."""
    return wait(c10d.all_reduce(x, "sum", "0"))


class Enter(torch.autograd.Function):
    """Nothing; the gradient is summed."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return reduced(grad.contiguous())


class Leave(torch.autograd.Function):
    """A sum over ranks; the gradient is as it is."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return reduced(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def layer(x: Tensor, qkv: Tensor, o: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One decoder layer, without rotary positions; heads of this rank."""
    b, t, _ = x.shape
    heads, kv = HEADS // RANKS, KV_HEADS // RANKS
    q, k, v = (Enter.apply(norm(x)) @ qkv).split([heads * HEAD, kv * HEAD, kv * HEAD], -1)
    q, k, v = (y.reshape(b, t, -1, HEAD).transpose(1, 2) for y in (q, k, v))
    k, v = (y.repeat_interleave(heads // kv, 1) for y in (k, v))
    out = attention(q, k, v, 0.0, True)[0].transpose(1, 2).reshape(b, t, -1)
    x = x + Leave.apply(out @ o)
    gate, value = (Enter.apply(norm(x)) @ up).chunk(2, -1)
    return x + Leave.apply(torch.nn.functional.silu(gate) * value @ down)


def megatron(batch: int, training: bool, layers: int = LAYERS) -> fx.Graph:
    """The layers on one rank, forward alone or with gradients of all weights."""
    width = (HEADS + 2 * KV_HEADS) // RANKS * HEAD
    one = [[HIDDEN, width], [HEADS // RANKS * HEAD, HIDDEN]]
    one += [[HIDDEN, 2 * INNER // RANKS], [INNER // RANKS, HIDDEN]]

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        for i in range(0, len(weights), len(one)):
            x = layer(x, *weights[i : i + len(one)])
        return x

    def step(x: Tensor, grad: Tensor, *weights: Tensor) -> list[Tensor]:
        given = [x.requires_grad_(), *(w.requires_grad_() for w in weights)]
        y = forward(*given)
        return [y, *torch.autograd.grad(y, given, grad)]

    x = [batch, TOKENS, HIDDEN]
    inputs = [x, x, *one * layers] if training else [x, *one * layers]
    graph = trace(step if training else forward, *inputs, dtype=torch.bfloat16)
    graph.eliminate_dead_code()
    return graph


Made = Iterator[tuple[str, fx.Graph, fx.Graph | None]]


def post_grad() -> Made:
    """The graphs of the zoo's tensor parallel program, as wide as Llama-3 8B: of the joint graph whole, and cut."""
    mesh = zoo.init_device_mesh("cpu", (RANKS,))
    for batch in (1, 4):
        whole, cut = (_captured(batch, split, mesh) for split in ("off", "auto"))
        for found, its in zip(whole, cut, strict=True):
            yield f"post-grad {found.phase}, TP + SP, batch {batch}", found.graph, its.graph


def _captured(batch: int, split: str, mesh: DeviceMesh) -> list[Captured]:
    sizes = {"WIDTH": HIDDEN, "HEADS": HEADS, "HIDDEN": INNER, "TOKENS": TOKENS, "BATCH": batch}
    # One mesh for all: torch takes what it knows of an equal one for a constant.
    sizes["init_device_mesh"] = lambda *_: mesh
    was = {name: getattr(zoo, name) for name in sizes}
    vars(zoo).update(sizes)
    try:
        torch.compiler.reset()
        with capturing(options(split=split, topology=TOPOLOGY)) as (backend, captured):
            zoo.tensor_parallel(lambda f: torch.compile(f, backend=backend, fullgraph=True))
    finally:
        vars(zoo).update(was)
    return captured


def graphs() -> Iterator[tuple[str, int, Callable[[], Made]]]:
    """What is looked at: a name, the ranks, and what makes its graphs."""
    for training in (False, True):
        kind = "training" if training else "forward"
        for batch in (1, 2, 4, 8):
            name = f"{kind}, TP, batch {batch}"
            yield name, RANKS, lambda n=name, b=batch, t=training: iter([(n, megatron(b, t), None)])
        for batch in (1, 4):
            name = f"{kind}, TP, batch {batch}, {DEEP} layers"
            yield (
                name,
                RANKS,
                lambda n=name, b=batch, t=training: iter([(n, megatron(b, t, DEEP), None)]),
            )
    yield "post-grad", RANKS, post_grad
    for name, step in STEPS.items():
        if "TP" in name or "EP" in name:
            yield name, WORLD, lambda n=name, s=step: iter([(n, trace_step(s, WORLD), None)])


def measured(name: str, graph: fx.Graph, half: fx.Graph | None) -> dict:
    """The graph scheduled whole and cut; ``half``: as it is where the joint graph was cut, or would have been."""
    row = {"graph": name, "nodes": len(graph.nodes)}
    cut, seconds = _ran(graph if half is None else half, "auto"), _seconds(graph)
    whole = _ran(graph, "off")
    split = next((p.split for p in cut.passes if p.split is not None), None)
    joint = None if half is None else half_of(half)
    if joint is not None and joint.is_cut:
        split, seconds = joint.record.split, CPU_SECONDS[id(joint.record.split)]
        row["joint"] = True
    uncut, after = whole.after.makespan_us, cut.after.makespan_us
    alone = "joint" not in row and split.layers == split.layers_tried
    limit = split.limit_us if alone else _limit(graph)
    distance = uncut - limit
    return row | {
        "decision": split.decision,
        "parts": split.parts,
        "regions": [
            f"{r.count} in {r.parts} parts along {r.along} of %{r.seed}"
            + (f", {r.half}" if r.half else "")
            for r in split.regions
        ],
        "launches_cut": split.launches,
        "joins": split.joins,
        "program_ms": round(whole.before.makespan_us / 1e3, 3),
        "uncut_ms": round(uncut / 1e3, 3),
        "cut_ms": round(after / 1e3, 3),
        "limit_ms": round(limit / 1e3, 3),
        "cut_over_uncut": round(after / uncut, 4),
        "uncut_over_limit": round(uncut / limit, 4),
        "cut_over_limit": round(after / limit, 4),
        "closed": round((uncut - after) / distance, 4) if distance > 1e-6 * uncut else 0.0,
        "peak_uncut_gib": round(whole.after.peak_bytes / 2**30, 3),
        "peak_cut_gib": round(cut.after.peak_bytes / 2**30, 3),
        "ended": [f"{end.count} x {end.operator}: {end.reason}" for end in split.ended],
        "layers": split.layers,
        "layers_tried": split.layers_tried,
        "tried": [f"{t.parts} parts along {t.along} of %{t.seed}" for t in split.tried],
        "split_cpu_seconds": round(seconds, 2),
    }


def _ran(graph: fx.Graph, split: str):  # noqa: ANN202
    trial = fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
    return run_passes(trial.graph, PassOptions(topology=TOPOLOGY, split=split))


CPU_SECONDS: dict[int, float] = {}  # processor time of the pass, by the record that it made
_run = SplitRegions.run


def _timed(self: SplitRegions, graph: fx.Graph):  # noqa: ANN202
    start = time.process_time()
    made = _run(self, graph)
    CPU_SECONDS[id(made.split)] = time.process_time() - start
    return made


def _seconds(graph: fx.Graph) -> float:
    """Processor time of the pass alone, the second time in this process."""
    trial = copy.deepcopy(graph)
    start = time.process_time()
    run_pass(SplitRegions(COST), trial)
    return time.process_time() - start


def _limit(graph: fx.Graph) -> float:
    return limit_us(ScheduleGraph(COST).extract(graph).problem)


def main() -> None:
    """Trace, cut, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--only", default="", help="part of a name")
    given = parser.parse_args()
    SplitRegions.run = _timed  # type: ignore[method-assign]
    rows = []
    for name, ranks, make in graphs():
        if given.only not in name:
            continue
        with fake_group(ranks):
            for made in make():
                rows.append(measured(*made))
                print(json.dumps(rows[-1]), flush=True)
    keys = ("cut_over_uncut", "uncut_over_limit", "cut_over_limit")
    summary = {key: round(statistics.geometric_mean(r[key] for r in rows), 4) for key in keys}
    summary["worst_cut_over_uncut"] = max(r["cut_over_uncut"] for r in rows)
    print("geometric means:", summary)
    if given.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/split.py",
            "kind": "simulated on h100x8; processor time on a machine with other work",
            "torch": torch.__version__,
            "summary": summary,
            "rows": rows,
        }
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
