"""``all_gather_matmul`` on one GPU: its product against cuBLAS, and how much of an emulated link
it hides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_link import PROGRAMS as LINK_PROGRAMS
from gpu_link import Link
from gpu_timing import median_us, poisoned_outputs, relative_error

from inductor_passes.cost import load_topology
from inductor_passes.cost.machine import Machine
from inductor_passes.fused import fusion
from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.gather_tma import MAX_CHUNKS
from inductor_passes.fused.kernels.tiles import (
    Tiles,
    capability_of,
    multiprocessors,
    tile_product,
    tiles_for,
)
from inductor_passes.fused.kernels.workspace import Workspace, bytes_needed

BF16 = torch.bfloat16
WORLD = 8
TOPOLOGY = "h100x8"
RATES = (450.0, 150.0, 50.0)  # GB/s
# rows of all ranks, N, K: gate+up and QKV of a 70B model, a short batch
PRODUCTS = ((8192, 7168, 8192), (8192, 1280, 8192), (2048, 7168, 8192))
# Looks at a flag: some ten seconds.
SPIN_LIMIT = 20_000_000


@triton.jit
def plain_product_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    b_row: tl.tensor,
    b_col: tl.tensor,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """The same tiles in the same order, with nothing to wait for: what flags cost is the
    difference.
    """
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    high = tl.cdiv(M, BM)
    for t in tl.range(tl.program_id(0), high * tl.cdiv(N, BN), PROGRAMS, flatten=False):
        first_row = t % high * BM
        first_col = t // high * BN
        acc = tile_product(
            a_ptr + tl.cast(first_row, tl.int64) * K,
            b_ptr + tl.cast(first_col, tl.int64) * b_col,
            M - first_row,
            N - first_col,
            K,
            K,
            b_row,
            b_col,
            BM,
            BN,
            BK,
            EVEN,
            dev.REAL,
        )
        row = tl.arange(0, BM)
        col = tl.arange(0, BN)
        out = c_ptr + tl.cast(first_row, tl.int64) * N + first_col + row[:, None] * N + col[None, :]
        inside = (row < M - first_row)[:, None] & (col < N - first_col)[None, :]
        tl.store(out, acc.to(DTYPE), mask=inside)


class GatherCase:
    """One rank of eight, whose peers are an emulated link.

    The link's 16 multiprocessors stand for those that push this rank's rows to its peers, so the
    kernel itself has no copiers beside it: as on eight GPUs, the others multiply. ``joined`` is the
    other way to see it: the kernel's own copiers push, at the speed of memory, and then multiply
    too; the peers' rows are there, and one program releases their flags at the link's rate.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        tiles: Tiles | None = None,
        descriptors: bool | None = None,
    ) -> None:
        place = torch.device("cuda")
        self.m, self.n, self.k = m, n, k
        self.rows = torch.randn(m, k, device=place, dtype=BF16)
        # The weight of a linear layer, transposed.
        self.weight = (torch.randn(n, k, device=place, dtype=BF16) / k**0.5).t()
        self.own = self.rows[: m // WORLD].clone()
        capability = capability_of(place)
        self.descriptors = (
            tma.can_describe(capability, self.rows, [self.weight])
            if descriptors is None
            else descriptors
        )
        if tiles is None and self.descriptors:
            tiles = tma.tma_tiles(m // WORLD)
        self.tiles = tiles or tiles_for(BF16, m // WORLD, capability)
        size = bytes_needed(self.rows.nbytes)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=place) for _ in range(WORLD)]
        self.whole = self.space(buffers, multiprocessors(place))
        self.beside_link = self.space(buffers, multiprocessors(place) - LINK_PROGRAMS)
        high = triton.cdiv(m // WORLD, self.tiles.m)
        chunk_rows = self.tiles.m * triton.cdiv(high, MAX_CHUNKS.value)
        self.link = Link(buffers[0], self.rows, WORLD, chunk_rows)
        self.side = torch.cuda.Stream(priority=-1)
        self.out = torch.empty(m, n, device=place, dtype=BF16)

    def space(self, buffers: Sequence[torch.Tensor], programs: int) -> Workspace:
        return Workspace(
            gather.FAMILY, buffers, 0, programs=programs, flags=16, spin_limit=SPIN_LIMIT
        )

    def cublas(self) -> None:
        torch.mm(self.rows, self.weight, out=self.out)

    def plain(self) -> None:
        tiles = tiles_for(BF16, self.m // WORLD, capability_of(self.rows.device))
        programs = self.whole.programs
        plain_product_kernel[(programs,)](
            self.rows,
            self.weight,
            self.out,
            self.m,
            self.n,
            self.k,
            self.weight.stride(0),
            self.weight.stride(1),
            PROGRAMS=programs,
            BM=tiles.m,
            BN=tiles.n,
            BK=tiles.k,
            EVEN=tiles.is_even(self.k, self.n),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def multiply(self, space: Workspace, copiers: int | None = 0) -> torch.Tensor:
        (result,) = gather.launch_all_gather_matmul(
            self.own,
            [self.weight],
            [],
            space,
            tiles=self.tiles,
            copiers=copiers,
            descriptors=self.descriptors,
        )
        return result

    def joined(self, rate: float) -> torch.Tensor:
        """The kernel with its own copiers, beside flags that come at the link's rate."""
        current = torch.cuda.current_stream()
        self.link.begin()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self.link.send(rate, copies=False)
        result = self.multiply(self.whole, copiers=None)
        current.wait_stream(self.side)
        return result

    def alone(self, rate: float) -> None:
        """The link and nothing else."""
        self.link.begin()
        self.link.send(rate)

    def in_turn(self, rate: float) -> None:
        """All rows, then one product."""
        self.alone(rate)
        self.cublas()

    def chunked(self, rate: float) -> None:
        """What upstream's pipeline does: one product for each rank's rows, as they come."""
        current = torch.cuda.current_stream()
        self.link.begin()
        self.side.wait_stream(current)
        came = [torch.cuda.Event() for _ in range(WORLD)]
        with torch.cuda.stream(self.side):
            for peer in range(1, WORLD):
                self.link.send(rate, peer=peer)
                came[peer].record()
        for rank in range(WORLD):
            if rank:
                current.wait_event(came[rank])
            part = slice(rank * (self.m // WORLD), (rank + 1) * (self.m // WORLD))
            torch.mm(self.rows[part], self.weight, out=self.out[part])

    def fused(self, rate: float, *, backwards: bool = False) -> torch.Tensor:
        """The kernel beside the link."""
        current = torch.cuda.current_stream()
        self.link.begin()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self.link.send(rate, backwards=backwards)
        result = self.multiply(self.beside_link)
        current.wait_stream(self.side)
        return result

    def error(self, rate: float, *, backwards: bool = False) -> float:
        """How far fused is from cuBLAS, on fresh rows; infinite where a row was read before it
        came.
        """
        self.rows.normal_()
        self.own.copy_(self.rows[: self.m // WORLD])
        self.link.prepare(self.beside_link)
        with poisoned_outputs():
            result = self.fused(rate, backwards=backwards)
        torch.cuda.synchronize()
        self.beside_link.raise_if_failed()
        return relative_error(result, self.rows @ self.weight)


def predicted(
    m: int, n: int, k: int, rate: float, product_us: float, comm_us: float
) -> dict[str, Any]:
    """What the pass expects of such a link and product, and whether it would fuse."""
    topology = load_topology(TOPOLOGY)
    link = Machine(dataclasses.replace(topology, intra_gb_per_s=rate / fusion.COPY_SHARE))
    payload = m // WORLD * k * BF16.itemsize
    fused = fusion.all_gather_matmul_us(link, payload, WORLD, product_us, 0)
    gain = fusion.Prediction(product_us + comm_us, fused)
    return {"predicted_fused": fused, "taken": gain.pays}


def measure_all_gather_matmul(
    m: int, n: int, k: int, rates: Sequence[float] = RATES, tiles: Tiles | None = None
) -> dict[str, Any]:
    """Times in microseconds of one shape, and of the link at each rate."""
    case = GatherCase(m, n, k, tiles)
    link, whole, rest = case.link, case.whole, case.beside_link
    cublas, plain = median_us(case.cublas), median_us(case.plain)
    preset = median_us(lambda: case.multiply(whole), lambda: link.preset(whole))
    on_the_rest = median_us(lambda: case.multiply(rest), lambda: link.preset(rest))

    def throttled(rate: float) -> dict[str, float]:
        def ready() -> None:
            link.prepare(rest)

        def there() -> None:
            link.preset(whole)
            link.flags.zero_()

        comm = median_us(lambda: case.alone(rate), ready)
        sequential = median_us(lambda: case.in_turn(rate), ready)
        fused = median_us(lambda: case.fused(rate), ready)
        hideable = sequential - max(cublas, comm)
        return {
            "gb_per_s": rate,
            "t_comm": comm,
            "sequential": sequential,
            "chunked": median_us(lambda: case.chunked(rate), ready),
            "fused": fused,
            "fused_joined": median_us(lambda: case.joined(rate), there),
            "reversed_order": median_us(lambda: case.fused(rate, backwards=True), ready),
            "fused_over_longer": fused / max(on_the_rest, comm),
            "fused_over_longer_with_cublas": fused / max(cublas, comm),
            "hidden_share": (sequential - fused) / hideable,
            **predicted(m, n, k, rate, cublas, comm),
            "largest_error": max(case.error(rate), case.error(rate, backwards=True)),
        }

    links = [throttled(rate) for rate in rates]
    for space in (whole, rest):
        space.raise_if_failed()
    return {
        "shape": [m, n, k],
        "t_cublas": cublas,
        "t_triton": preset,
        "t_triton_by_threads": plain,
        "t_triton_beside_link": on_the_rest,
        "share_of_cublas": cublas / preset,
        "links": links,
    }
