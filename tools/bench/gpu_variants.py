"""Every way to compute the fused products beside cuBLAS, in turns, on the shapes of Llama 3 under
tensor parallel 8.

One rank of eight on one GPU. Flags are set before: nothing is waited for. ``with copies`` pushes
this rank's rows to seven buffers of the same memory, as fast as that goes; a link between GPUs is
not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from gpu_products import GatherCase
from gpu_timing import in_turns_us, relative_error

from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.tiles import Tiles, capability_of, multiprocessors, tiles_for
from inductor_passes.fused.kernels.workspace import Workspace, bytes_needed

BF16 = torch.bfloat16
WORLD = 8
# rows of all ranks, N of one rank, K: gate and up, QKV of 70B and 8B
GATHERS = (
    (8192, 7168, 8192),
    (8192, 1280, 8192),
    (8192, 3584, 4096),
    (8192, 768, 4096),
    (2048, 7168, 8192),
)
# down and output projections, K of one rank
SCATTERS = ((8192, 8192, 3584), (8192, 8192, 1024), (8192, 4096, 1792), (8192, 4096, 512))


def measure_variants() -> dict[str, Any]:
    """Microseconds of each variant of both fused products, and cuBLAS's time over it."""
    found = {f"gather, {m} x {n} x {k}": gather(m, n, k) for m, n, k in GATHERS}
    found |= {f"scatter, {m} x {n} x {k}": push(m, n, k) for m, n, k in SCATTERS}
    wrong = {name: case["problems"] for name, case in found.items() if case["problems"]}
    return found | ({"problem": str(wrong)} if wrong else {})


def gather(m: int, n: int, k: int) -> dict[str, Any]:
    """One shape."""
    place = torch.device("cuda")
    threads = GatherCase(m, n, k, tiles_for(BF16, m // WORLD, capability_of(place)), False)
    variants: dict[str, Callable[[], Any]] = {"cublas": threads.cublas}
    wanted = threads.rows @ threads.weight
    before: dict[str, Callable[[], None]] = {}
    problems: dict[str, str] = {}

    def add(name: str, case: GatherCase, copiers: int | None) -> None:
        case.link.preset(case.whole)
        error = relative_error(case.multiply(case.whole, copiers=copiers), wanted)
        if not error < 2e-2:
            problems[name] = f"error {error}"
            return
        before[name] = functools.partial(case.link.preset, case.whole)
        variants[name] = functools.partial(case.multiply, case.whole, copiers=copiers)

    add("threads", threads, 0)
    add("threads with copies", threads, None)
    case = GatherCase(m, n, k, tma.tma_tiles(m // WORLD), True)
    case.rows, case.own, case.weight = threads.rows, threads.own, threads.weight
    case.link.rows = threads.rows
    add("descriptors", case, 0)
    add("descriptors with copies", case, None)
    found = in_turns_us(variants, before)
    return _shares(found, problems)


def push(m: int, n: int, k: int) -> dict[str, Any]:
    """One shape: the product whose tiles go to eight buffers of this memory, and the reduction
    beside a copy.
    """
    place = torch.device("cuda")
    a = torch.randn(m, k, device=place, dtype=BF16)
    weight = (torch.randn(n, k, device=place, dtype=BF16) / k**0.5).t()
    out = torch.empty(m, n, device=place, dtype=BF16)
    size = bytes_needed(out.nbytes)
    buffers = [torch.zeros(size, dtype=torch.uint8, device=place) for _ in range(WORLD)]
    programs = multiprocessors(place)
    space = Workspace(scatter.FAMILY, buffers, 0, programs=programs, flags=1, spin_limit=1000)
    own = out[: m // WORLD]

    def pushed(tiles: Tiles, descriptors: bool) -> None:
        scatter.push(a, weight, space, tiles=tiles, descriptors=descriptors)

    threads = tiles_for(BF16, m // WORLD, capability_of(place))
    variants: dict[str, Callable[[], Any]] = {
        "cublas": lambda: torch.mm(a, weight, out=out),
        "threads": lambda: pushed(threads, False),
        "descriptors": lambda: pushed(tma.tma_tiles(m // WORLD), True),
        "sum of parts": lambda: scatter.add_parts(own, space, tiles=0, average=False),
        "copy of as many bytes": lambda: buffers[1][: 9 * own.nbytes // 2].copy_(
            buffers[0][: 9 * own.nbytes // 2]
        ),
    }
    wanted = a @ weight
    problems = {}
    for name in ("threads", "descriptors"):
        variants[name]()
        torch.cuda.synchronize()
        epoch = int(space.state[0, dev.EPOCHS.value])
        first = buffers[0].numel() - 2 * space.half_bytes + (epoch & 1) * space.half_bytes
        part = [b[first:][: own.nbytes].view(BF16).view(own.shape) for b in buffers]
        error = relative_error(torch.cat(part), wanted)
        if not error < 2e-2:
            problems[name] = f"error {error}"
    return _shares(in_turns_us(variants, {}), problems)


def _shares(us: dict[str, float], problems: dict[str, str]) -> dict[str, Any]:
    shares = {name: us["cublas"] / t for name, t in us.items() if name != "cublas"}
    return {"us": us, "share_of_cublas": shares, "problems": problems}
