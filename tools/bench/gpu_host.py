"""Host time of a step compiled with the passes on one GPU, beside eager and upstream, with and
without CUDA graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import inductor_passes

WIDTH, LAYERS = 256, 8
WARM_UPS, CALLS = 10, 100
MODES = {"default": {}, "reduce-overhead": {"triton.cudagraphs": True}}


def measure_host() -> dict[str, Any]:
    """Microseconds of the host for a step of small products on a group of one rank, and ratios
    to eager and upstream.
    """
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return steps(torch.device("cuda"))
    finally:
        dist.destroy_process_group()


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A gathered weight and a product for each layer."""
    for w in weights:
        x = torch.relu(x @ fc.all_gather_tensor(w, 0, dist.group.WORLD)) * 0.05
    return x


def steps(place: torch.device, calls: int = CALLS) -> dict[str, Any]:
    """The same on any device, in an initialised group."""
    inputs = [torch.randn(WIDTH, WIDTH, device=place) for _ in range(LAYERS + 1)]
    found: dict[str, Any] = {"eager_us": host_us(lambda: layers(*inputs), calls)}
    for mode, options in MODES.items():
        times = {}
        for side, given in (("upstream", options), ("ours", inductor_passes.options(options))):
            torch.compiler.reset()
            step = torch.compile(layers, fullgraph=True, options=given)
            times[side] = host_us(lambda step=step: step(*inputs), calls)
        found[mode] = {
            "upstream_us": times["upstream"],
            "ours_us": times["ours"],
            "ours_over_upstream": times["ours"] / times["upstream"],
            "ours_over_eager": times["ours"] / found["eager_us"],
        }
    return found


def host_us(step: Callable[[], Any], calls: int) -> float:
    """Median time until a call returns; the device has ended what came before."""
    on_gpu = torch.cuda.is_available()
    times = []
    for _ in range(WARM_UPS + calls):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[WARM_UPS:])
