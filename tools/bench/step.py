#!/usr/bin/env python
"""What does a whole training step as one graph take, beside forward and backward alone?

    python tools/bench/step.py --json tools/bench/results/step.json
    python tools/bench/step.py --parallel fsdp --ranks 2 --steps 12

Real gloo ranks of this host train the demo's Llama (4 layers, hidden 256, AdamW) in four ways, in
turns of a few steps: eager mode; ``blocks``, each block compiled by upstream's Inductor, as its
guides to FSDP2 advise; ``separate``, forward and backward compiled by the plugin with an eager
optimizer; ``whole``, one compiled function of forward, loss, backward, optimizer and
``zero_grad``. Figures are quartiles of the ratio of steps of the same number. ``fastest``: of the
fastest steps of each turn, the middle ratio. ``first_s``: seconds of the first step by the clock,
cold and with the caches of a first job. ``peak``: the most bytes of tensors that are alive in a
step at once, on the first rank, over what is alive before it. ``separate_ms``: where a step of
``separate`` goes, by torch's profiler: products and attention, which each way computes, and
collectives that it waits for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools" / "demo"), str(ROOT / "test" / "support")]
WAYS = {"eager": "eager", "blocks": "upstream", "separate": "ours", "whole": "ours"}
OTHERS = ("separate", "blocks", "eager")
PARALLEL = ("tensor", "fsdp", "ddp")
SPENT = {
    "products_and_attention": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot"),
    "collectives": ("_c10d_functional::wait_tensor", "c10d::", "gloo:"),
}
IN_TURN = 5  # the first of them fills caches that switching the plugin has emptied


def worker(options: argparse.Namespace) -> None:
    """One rank: what it measured, as a file of JSON."""
    import data
    import torch
    import torch.distributed as dist
    from live_memory import peak_bytes
    from torch.nn.parallel import DistributedDataParallel

    from dynamo_dist.numerics.comparison import plugin_for
    from dynamo_dist.torch_compat.dynamo_compiler import unique_graphs
    from inductor_passes.testing import leave_process

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = data.mesh_of("tensor" if options.parallel == "tensor" else "fsdp")
    turns = -(-options.steps // (IN_TURN - 1))
    sizes = data.Sizes(options.layers, options.hidden)
    batches = data.text_batches(sizes, 1 + IN_TURN * turns)
    if options.parallel != "tensor":
        # Ranks have rows of their own.
        batches = [each.chunk(dist.get_world_size())[dist.get_rank()] for each in batches]

    def load() -> torch.nn.Module:
        if options.parallel == "ddp":
            return DistributedDataParallel(data._from_pretrained(options.work / "checkpoint"))
        return data.load(options.work / "checkpoint", options.parallel, mesh)

    def build(way: str) -> Callable[[torch.Tensor], torch.Tensor]:
        model = load()
        inner = getattr(model, "module", model)
        # Tensor parallelism leaves norms plain tensors: a list may not mix the two kinds.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        if way == "blocks":
            for block in inner.model.layers:
                block.compile()
        forward = torch.compile(model, backend="dynamo_dist") if way == "separate" else model

        # Two functions, as two programs have: of one that runs whole and in parts, ranks could not
        # know which a peer runs, and would keep the program's order.
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        @torch.compile(backend="dynamo_dist", fullgraph=True)
        def whole_step(batch: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return whole_step if way == "whole" else step

    found: dict[str, Any] = {}
    steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for way in options.ways:
        with plugin_for(WAYS[way]):
            steps[way] = build(way)
            dist.barrier()
            before, start = unique_graphs(), time.perf_counter()
            loss = steps[way](batches[0]).item()
            first_s = time.perf_counter() - start
            found[way] = {"first_s": first_s, "losses": [loss], "turns_ms": []}
            found[way]["graphs"] = unique_graphs() - before
    order = list(options.ways)
    for turn in range(turns):
        order.append(order.pop(0))  # none always follows the same one
        for way in order:
            with plugin_for(WAYS[way]):
                times = []
                for batch in batches[1 + turn * IN_TURN :][:IN_TURN]:
                    dist.barrier()
                    start = time.perf_counter()
                    found[way]["losses"].append(steps[way](batch).item())
                    times.append(1e3 * (time.perf_counter() - start))
            found[way]["turns_ms"].append(times[1:])
    for way in options.ways:
        with plugin_for(WAYS[way]):
            found[way]["peak_bytes"] = peak_bytes(lambda step=steps[way]: step(batches[0]))
            if way == "separate":
                found[way]["spent_ms"] = spent_ms(lambda step=steps[way]: step(batches[0]))
    if dist.get_rank() == 0:
        (options.work / "found.json").write_text(json.dumps(found))
    dist.barrier()
    leave_process()


def spent_ms(call: Callable[[], Any], times: int = 5) -> dict[str, float]:
    """Milliseconds of a call by what this rank's threads do in them, the mean of several."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for _ in range(times):
            call()
        all_ms = 1e3 * (time.perf_counter() - start) / times
    found = dict.fromkeys(SPENT, 0.0)
    for event in profiler.key_averages():
        for what, names in SPENT.items():
            if event.key.startswith(names):
                found[what] += event.self_cpu_time_total / 1e3 / times
    return {**found, "all": all_ms}


def job(options: argparse.Namespace, parallel: str, ranks: int, caches: Path) -> dict[str, Any]:
    """Run one job of fresh processes; what its first rank found."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone")
    arguments = ("--worker", "--parallel", parallel, "--work", str(options.work))
    sizes = (f"--steps={options.steps}", f"--layers={options.layers}", f"--hidden={options.hidden}")
    subprocess.run(
        [sys.executable, *launcher, __file__, *arguments, *sizes, "--ways", *options.ways],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
        },
        check=True,
        timeout=3600,
    )
    found: dict[str, Any] = json.loads((options.work / "found.json").read_text())
    return found


def summary(found: dict[str, Any], warm: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of one job: ratios to ``separate``, ``blocks`` and ``eager`` in turns."""
    steps = {way: [*itertools.chain(*each["turns_ms"])] for way, each in found.items()}
    fastest = {way: [min(times) for times in each["turns_ms"]] for way, each in found.items()}
    last = found["whole"]["losses"], found["eager"]["losses"]
    rows: dict[str, Any] = {
        "graphs": found["whole"]["graphs"],
        "loss_off": max(abs(a - b) for a, b in zip(*last, strict=True)),
        "step_ms": {way: round(median(each), 2) for way, each in steps.items()},
        "first_s": {way: round(each["first_s"], 1) for way, each in found.items()},
        "peak_over_separate": round(
            found["whole"]["peak_bytes"] / found["separate"]["peak_bytes"], 3
        ),
    }
    if "separate" in found:
        spent = found["separate"]["spent_ms"]
        rows["separate_ms"] = {what: round(each, 1) for what, each in spent.items()}
    for other in (each for each in OTHERS if each in found):
        ratios, least = (
            [a / b for a, b in zip(times["whole"], times[other], strict=True)]
            for times in (steps, fastest)
        )
        rows[f"over_{other}"] = [round(each, 3) for each in quantiles(ratios, n=4)]
        rows[f"fastest_over_{other}"] = round(median(least), 3)
    if warm is not None:
        rows["warm_first_s"] = {way: round(each["first_s"], 1) for way, each in warm.items()}
    return rows


def main() -> None:
    """Run all jobs; print a line of figures each, and their geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parallel", nargs="+", default=list(PARALLEL), choices=PARALLEL)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=30, help="that are timed, of each way")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=tuple(WAYS))
    parser.add_argument("--no-warm", action="store_true", help="no second job with kept caches")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (options.parallel,) = options.parallel
        worker(options)
        return
    import data

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        data.write_checkpoint(
            options.work / "checkpoint", data.Sizes(options.layers, options.hidden)
        )
        for ranks in options.ranks:
            for parallel in options.parallel:
                caches = options.work / f"caches_{parallel}_{ranks}"
                found = job(options, parallel, ranks, caches)
                warm = None if options.no_warm else job(options, parallel, ranks, caches)
                name = f"{parallel}, {ranks} ranks"
                results[name] = summary(found, warm)
                print(name, json.dumps(results[name]), flush=True)
    for other in (each for each in OTHERS if each in options.ways):
        results[f"geometric_mean_over_{other}"] = round(
            geometric_mean(
                row[f"over_{other}"][1] for row in results.values() if isinstance(row, dict)
            ),
            3,
        )
        print(f"whole over {other}: {results[f'geometric_mean_over_{other}']}")
    if options.json:
        import torch

        shape = {"layers": options.layers, "hidden": options.hidden, "steps": options.steps}
        what = "real processes, gloo on one host of two cores; ratios of steps in turns, quartiles"
        result = {"torch": torch.__version__, "what": what, **shape, **results}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
