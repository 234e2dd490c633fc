"""Measure this host's CPU and two gloo ranks on it, and write a topology file.

    python tools/calibrate.py --out inductor_passes/cost/data/cpu-gloo.json

Two processes measure at the same time, as ranks of a job would run, each with one thread (torchrun's
default). Every figure is the best of its repetitions on rank 0, because what else runs on the host only
ever adds time; median and spread are printed beside it. What one host cannot show, the link between
hosts, is taken from the command line.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from inductor_passes.cost.topology_file import dump_topology

RANKS = 2
REPETITIONS = 60
LARGE_BYTES = 16 * 2**20
COPY_BYTES = 64 * 2**20
Times = dict[str, list[float]]


def samples_us(fn: Callable[[], object], inner: int = 1) -> list[float]:
    """Microseconds of one call, as many times as we repeat; both ranks start each one together."""
    fn()
    samples = []
    for _ in range(REPETITIONS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(inner):
            fn()
        samples.append((time.perf_counter() - start) / inner * 1e6)
    return samples


def measure() -> Times:
    """Every raw time of this rank."""
    times: Times = {}
    for name, size in (("float32", 512), ("float64", 512), ("bfloat16", 128)):
        a = torch.randn(size, size).to(getattr(torch, name))
        times[f"matmul {name} {size}"] = samples_us(lambda a=a: a @ a)
    q = torch.randn(1, 4, 512, 64)
    attention = torch.nn.functional.scaled_dot_product_attention
    times["attention"] = samples_us(lambda: attention(q, q, q))
    source = torch.randn(COPY_BYTES // 4)
    target = torch.empty_like(source)
    times["copy"] = samples_us(lambda: target.copy_(source))
    small = torch.ones(16)
    # The call that compiled code makes; renamed in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    times["small kernel"] = samples_us(lambda: torch.add(small, small, out=small), inner=200)
    for label, elements, inner in (("small", 1, 50), ("large", LARGE_BYTES // 4, 1)):
        mine = torch.ones(elements)
        everyone = torch.empty(RANKS * elements)
        times[f"all_gather {label}"] = samples_us(
            lambda mine=mine, everyone=everyone: gather(everyone, mine), inner
        )
        times[f"all_reduce {label}"] = samples_us(lambda mine=mine: dist.all_reduce(mine), inner)
    return times


def worker(rank: int, queue: Any, port: int) -> None:
    """One rank: join the others, measure, hand the times to the parent."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    times = measure()
    if rank == 0:
        queue.put(times)
    dist.destroy_process_group()


def topology(times: Times, inter_gb_per_s: float) -> dict[str, Any]:
    """The topology file's content."""
    host = f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}"
    how = (
        f"measured by tools/calibrate.py, two gloo ranks of one thread, best of {REPETITIONS}, {host}, "
        f"load average {os.getloadavg()[0]:.1f}, {datetime.date.today()}"
    )

    def us(name: str) -> float:
        return min(times[name])

    def figure(value: float, source: str) -> dict[str, Any]:
        return {
            "value": value if isinstance(value, int) else float(f"{value:.4g}"),
            "source": source,
        }

    matmul, rates = {}, {}
    for key in times:
        if key.startswith("matmul"):
            _, dtype, size = key.split()
            rates[dtype] = 2 * int(size) ** 3 / us(key) / 1e6
            matmul[dtype] = {
                "peak_tflops": figure(rates[dtype], f"{how}: product of two {size}x{size}"),
                "efficiency": figure(1, "the peak given is a measured rate"),
            }
    attention = 4 * 4 * 512 * 512 * 64 / us("attention") / 1e6
    # Two ranks: a gather is one step, a reduction two; both move the payload once.
    small_gather, small_reduce = us("all_gather small"), us("all_reduce small")
    step = max(small_reduce - small_gather, 0.1 * small_gather)
    step = min(step, 0.9 * small_gather)
    rate = LARGE_BYTES / (us("all_gather large") - small_gather) / 1e3
    share = figure(1, "by definition: the link's rate is what gloo reaches")
    return {
        "name": "cpu-gloo",
        "description": "Gloo ranks on one CPU host, one thread each; between hosts 1 Gb/s Ethernet.",
        "ranks_per_node": figure(
            64, "a choice: ranks of a gloo job share a host unless there are many"
        ),
        "device": {
            "matmul": matmul,
            "attention_efficiency": figure(
                min(1.0, attention / rates["float32"]),
                f"{how}: 4 heads, sequence 512, head 64, over the float32 product",
            ),
            "memory_gb_per_s": figure(
                2 * COPY_BYTES / us("copy") / 1e3,
                f"{how}: copy of 64 MiB, reads plus writes",
            ),
            "kernel_us": figure(us("small kernel"), f"{how}: add of 16 elements"),
        },
        "links": {
            "intra_node_gb_per_s": figure(rate, f"{how}: all_gather of 16 MiB"),
            "inter_node_gb_per_s": figure(
                inter_gb_per_s, "line rate of the Ethernet assumed between hosts, not measured"
            ),
            "protocols": [
                {
                    "name": "tcp",
                    "launch_us": figure(
                        small_gather - step, f"{how}: all_gather of 4 bytes, less a step"
                    ),
                    "intra_node": {
                        "step_us": figure(step, f"{how}: all_reduce less all_gather of 4 bytes"),
                        "bandwidth_share": share,
                    },
                    "inter_node": {
                        "step_us": figure(step, "not measured between hosts: as within one"),
                        "bandwidth_share": share,
                    },
                }
            ],
            "all_reduce_in_node": {
                "launch_us": figure(small_reduce, f"{how}: all_reduce of 4 bytes"),
                "gb_per_s": figure(
                    LARGE_BYTES / (us("all_reduce large") - small_reduce) / 1e3,
                    f"{how}: all_reduce of 16 MiB",
                ),
            },
        },
    }


def cpu_name() -> str:
    """Model name of the CPU, or what the platform has to say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="file to write; without it the JSON is printed")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--inter-node-gb-per-s", type=float, default=0.125)
    options = parser.parse_args()
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=worker, args=(r, queue, options.port)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    times = queue.get(timeout=300)
    for process in ranks:
        process.join()
    for name, samples in times.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        print(
            f"{name:22} best {min(samples):10.1f} us, median {middle:10.1f}, "
            f"interquartile range {high - low:10.1f}"
        )
    text = dump_topology(topology(times, options.inter_node_gb_per_s)) + "\n"
    if not options.out:
        print(text, end="")
        return
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
