"""A training step as one graph on one GPU: numbers, times and memory, with and without CUDA graphs.

The demo's Llama under FSDP2 on a group of one rank. ``blocks`` is each block compiled by upstream's
Inductor, as its guides to FSDP2 advise; ``separate`` is forward and backward compiled by the
plugin, and an eager optimizer; ``whole`` is the step as one compiled function.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_parts import ROOT

WAYS = {"eager": "eager", "blocks": "upstream", "separate": "ours", "whole": "ours"}
CUDA_GRAPHS = {"triton.cudagraphs": True}
WARM_UPS, CALLS = 6, 30


def measure_small_step() -> dict[str, Any]:
    """Milliseconds and bytes of a step of each way; the GPU waits for the host."""
    return measure(4, 256, 4, 128)


def measure_large_step() -> dict[str, Any]:
    """Milliseconds and bytes of a step of each way; the host waits for the GPU."""
    return measure(8, 2048, 8, 512)


def measure(*shape: int) -> dict[str, Any]:
    """Measure one shape on a group of one rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return ways("cuda", *shape)
    finally:
        dist.destroy_process_group()


def ways(
    device: str, layers: int, hidden: int, batch: int, sequence: int, calls: int = CALLS
) -> dict[str, Any]:
    """The same for one shape, in an initialised group of one rank."""
    sys.path.insert(0, str(ROOT / "tools" / "demo"))
    import data

    from dynamo_dist.numerics.comparison import plugin_for

    torch.set_float32_matmul_precision("high")
    sizes = data.Sizes(layers, hidden, batch, sequence)
    batches = [each.to(device) for each in data.text_batches(sizes, WARM_UPS + calls)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data.write_checkpoint(Path(folder), sizes)
        for name, side in WAYS.items():
            for options in ({}, CUDA_GRAPHS) if name != "eager" else ({},):
                torch.compiler.reset()
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                key = f"{name}, CUDA graphs" if options else name
                try:
                    with plugin_for(side):
                        step = built(data, Path(folder), device, name, options)
                        found[key] = timed(step, batches, device)
                except Exception as error:  # the other ways are still worth their time
                    found[key] = {"problem": f"{type(error).__name__}: {error}"[:600]}
    reference = found["eager"]["losses"]
    for each in found.values():
        if losses := each.pop("losses", None):
            each["loss_off"] = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
    return found


def built(
    data: Any, folder: Path, device: str, way: str, options: dict[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes a training step on a batch and returns the loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = data._from_pretrained(folder).to(device)
    mesh = init_device_mesh(device, (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
        if way == "blocks":
            block.compile(options=options)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = model
    if way == "separate":
        forward = torch.compile(model, backend="dynamo_dist", options=options)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way != "whole":
        return step
    return torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)


def timed(
    step: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor], device: str
) -> dict[str, Any]:
    """Medians: until the call returns, and until the device has ended; and the peak of memory."""
    on_gpu = device == "cuda"
    losses, host, whole = [], [], []
    start = time.perf_counter()
    for i, batch in enumerate(batches):
        if i == WARM_UPS and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        loss = step(batch)
        returned = time.perf_counter()
        losses.append(loss.item())  # waits for the device
        if i == 0:
            first_s = time.perf_counter() - start
        if i >= WARM_UPS:
            host.append(returned - before)
            whole.append(time.perf_counter() - before)
    return {
        "first_s": round(first_s, 2),
        "host_ms": round(1e3 * statistics.median(host), 3),
        "step_ms": round(1e3 * statistics.median(whole), 3),
        "peak_mib": torch.cuda.max_memory_allocated() >> 20 if on_gpu else None,
        "reserved_mib": torch.cuda.max_memory_reserved() >> 20 if on_gpu else None,
        "losses": losses,
    }
