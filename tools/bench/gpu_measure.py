"""Measurements of ``gpu.py``: medians of CUDA-event times on one GPU, in microseconds, with fresh inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
from gpu_link import PROGRAMS as LINK_PROGRAMS
from gpu_link import Link

from inductor_passes.kernels import all_gather_matmul as gather
from inductor_passes.kernels import all_reduce as reduce
from inductor_passes.kernels import reduce_chunks as chunks
from inductor_passes.kernels import workspace as spaces
from inductor_passes.kernels.all_reduce_add_norm import launch_all_reduce_add_norm
from inductor_passes.kernels.norm import Norm
from inductor_passes.kernels.tiles import capability_of, multiprocessors, tiles_for

BF16 = torch.bfloat16
REPEATS = 20
WORLD = 8
RATES = (450.0, 150.0, 50.0)  # GB/s
# rows of all ranks, N, K: gate+up and QKV of a 70B model, a short batch
PRODUCTS = ((8192, 7168, 8192), (8192, 1280, 8192), (2048, 7168, 8192))


def median_us(fn: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Median time of ``fn``; ``before`` is not timed."""
    times = []
    for i in range(REPEATS + 3):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Reads plus writes of a large copy: what memory bandwidth is here."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) / 1e3


def measure_all_gather_matmul(m: int, n: int, k: int) -> dict[str, Any]:
    """One rank of eight, whose peers are an emulated link; rows are poisoned before every call."""
    place = torch.device("cuda")
    rows = torch.randn(m, k, device=place, dtype=BF16)
    weight = torch.randn(k, n, device=place, dtype=BF16) / k**0.5
    own = rows[: m // WORLD].contiguous()
    buffers = [
        torch.zeros(spaces.bytes_needed(rows.nbytes), dtype=torch.uint8, device=place)
        for _ in range(WORLD)
    ]
    # The link's programs need multiprocessors of their own.
    programs = multiprocessors(place) - LINK_PROGRAMS
    space = spaces.Workspace("all_gather_matmul", buffers, 0, programs=programs, flags=16)
    tiles = tiles_for(BF16, m // WORLD, capability_of(place))
    high = triton.cdiv(m // WORLD, tiles.m)
    link = Link(space, rows, tiles.m * triton.cdiv(high, gather.MAX_CHUNKS.value))
    side = torch.cuda.Stream(priority=-1)
    out = torch.empty(m, n, device=place, dtype=BF16)
    results: list[torch.Tensor] = []

    def multiply() -> None:
        results[:] = gather.launch_all_gather_matmul(own, [weight], [], space, tiles=tiles)

    def start() -> None:
        link.begin()
        link.half().fill_(float("nan"))

    def beside(rate: float, backwards: bool = False) -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # first: its programs are resident before any that waits
            link.send(rate, backwards=backwards)
        multiply()
        current.wait_stream(side)

    def preset() -> None:
        link.begin()
        link.preset()

    def in_turn(rate: float) -> None:
        link.send(rate)
        torch.mm(rows, weight, out=out)

    def chunked(rate: float) -> None:
        """What stock's pipeline does: one product for each rank's rows, as they come."""
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        came = [torch.cuda.Event() for _ in range(WORLD)]
        with torch.cuda.stream(side):
            for peer in range(1, WORLD):
                link.send(rate, peer=peer)
                came[peer].record()
        for rank in range(WORLD):
            if rank:
                current.wait_event(came[rank])
            part = slice(rank * (m // WORLD), (rank + 1) * (m // WORLD))
            torch.mm(rows[part], weight, out=out[part])

    def as_fused() -> float:
        """Largest difference from cuBLAS, NaN where a row was read before it came."""
        space.raise_if_failed()
        return (results[0] - rows @ weight).abs().max().item()

    cublas = median_us(lambda: torch.mm(rows, weight, out=out))
    triton_us = median_us(multiply, preset)
    links = []
    for rate in RATES:
        comm = median_us(lambda r=rate: link.send(r), start)
        sequential = median_us(lambda r=rate: in_turn(r), start)
        fused = median_us(lambda r=rate: beside(r), start)
        error = as_fused()
        links.append(
            {
                "gb_per_s": rate,
                "t_comm": comm,
                "sequential": sequential,
                "chunked": median_us(lambda r=rate: chunked(r), start),
                "fused": fused,
                "reversed_order": median_us(lambda r=rate: beside(r, backwards=True), start),
                "fused_over_longer": fused / max(cublas, comm),
                "hidden_share": (sequential - fused) / max(1e-9, sequential - max(cublas, comm)),
                "largest_error": error,
            }
        )
    return {
        "shape": [m, n, k],
        "t_cublas": cublas,
        "t_triton": triton_us,
        "share_of_cublas": cublas / triton_us,
        "links": links,
    }


def measure_norm(copy_rate: float, rows: int = 4096, d: int = 8192) -> dict[str, Any]:
    """Eight virtual ranks in one cooperative launch, one-shot; against the same work in two kernels."""
    x = torch.randn(WORLD * rows, d, device="cuda", dtype=BF16)
    residual = torch.randn(rows, d, device="cuda", dtype=BF16).repeat(WORLD, 1)
    weight = torch.randn(d, device="cuda", dtype=BF16)
    terms = Norm(residual, weight=weight, out_dtype=BF16)

    def space(family: str) -> spaces.Workspace:
        programs = multiprocessors(x.device) // WORLD  # all of them resident at once
        return spaces.virtual_workspace(family, WORLD, rows * d * 2, "cuda", programs=programs)

    fused_space, sum_space = space("all_reduce_add_norm"), space("all_reduce")
    results: list[torch.Tensor] = []

    def fused() -> None:
        results[:] = launch_all_reduce_add_norm(x, terms, fused_space, two_shot=False)

    @torch.compile
    def add_norm(summed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = summed + residual
        return torch.nn.functional.rms_norm(total, (d,), weight, 1e-5), total

    def separate() -> None:
        add_norm(reduce.launch_all_reduce(x, sum_space, two_shot=False))

    times = {"fused": median_us(fused), "separate": median_us(separate)}
    fused_space.raise_if_failed()
    summed = x.view(WORLD, rows, d).float().sum(0)
    wanted = terms._replace(residual=residual[:rows]).of(summed)
    y = results[0].view(WORLD, rows, d)
    # Each rank reads its input, writes its buffer, reads all, reads the residual, writes total and y.
    moved = WORLD * rows * d * 2 * (2 + WORLD + 1 + 2)
    return {
        "shape": [WORLD, rows, d],
        **times,
        "share_of_copy": moved / times["fused"] / 1e3 / copy_rate,
        "speedup": times["separate"] / times["fused"],
        "largest_error": (y[0].float() - wanted[0].float()).abs().max().item(),
        "same_bits_on_all_ranks": all(torch.equal(y[0], y[r]) for r in range(1, WORLD)),
        **_replay(fused, fused_space, results),
    }


def _replay(
    fn: Callable[[], None], space: spaces.Workspace, results: list[torch.Tensor], times: int = 1000
) -> dict[str, Any]:
    """A CUDA graph of ``fn``, replayed: the same bits as the first time, and no failed wait."""
    fn()
    first = results[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    results[0].fill_(float("nan"))
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    space.raise_if_failed()
    return {"replays": times, "replays_keep_bits": torch.equal(results[0], first)}


def measure_reduce_chunks(copy_rate: float, n: int = 1 << 26) -> dict[str, Any]:
    """Eight chunks, bfloat16, against ``torch.sum``."""
    x = torch.randn(WORLD, n, device="cuda", dtype=BF16)
    ours = median_us(lambda: chunks.launch_reduce_chunks(x))
    theirs = median_us(lambda: torch.sum(x, 0))
    error = (chunks.launch_reduce_chunks(x) - chunks.reference(x)).abs().max().item()
    return {
        "shape": [WORLD, n],
        "t_triton": ours,
        "t_torch_sum": theirs,
        "share_of_copy": (WORLD + 1) * n * 2 / ours / 1e3 / copy_rate,
        "speedup": theirs / ours,
        "largest_error": error,
    }


def measure_all() -> dict[str, Any]:
    """Everything, in the order of ``gpu.py``'s report."""
    rate = copy_gb_per_s()
    return {
        "copy_gb_per_s": rate,
        "all_gather_matmul": [measure_all_gather_matmul(*shape) for shape in PRODUCTS],
        "all_reduce_add_rmsnorm": measure_norm(rate),
        "reduce_chunks": measure_reduce_chunks(rate),
    }
