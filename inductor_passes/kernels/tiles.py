"""The product of one tile, and the tile sizes that the fused products use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inductor_passes.kernels import device as dev

ACTIVATIONS = ("none", "relu", "silu", "gelu")


@triton.jit
def tile_product(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    K: tl.tensor,
    a_row: tl.tensor,
    b_row: tl.tensor,
    b_col: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """``[BM, BN]`` in float32, from pointers to the tile's first row of a and first column of b.

    ``rows`` and ``cols`` are how many of them are inside the matrices; a's columns are contiguous.
    ``EVEN`` promises that K is a multiple of BK and every column is inside.
    """
    ra = tl.arange(0, BM)
    ra = tl.where(ra < rows, ra, 0)  # rows beyond the end repeat the first and are not stored
    rb = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a = a_ptr + ra[:, None] * a_row + rk[None, :]
    b = b_ptr + rk[:, None] * b_row + rb[None, :] * b_col
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        if EVEN:
            acc = dev.mma(tl.load(a), tl.load(b), acc, MODE)
        else:
            left = K - k * BK
            inside_a = rk[None, :] < left
            inside_b = (rk[:, None] < left) & (rb[None, :] < cols)
            acc = dev.mma(
                tl.load(a, mask=inside_a, other=0.0),
                tl.load(b, mask=inside_b, other=0.0),
                acc,
                MODE,
            )
        a += BK
        b += BK * b_row
    return acc


@triton.jit
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of that name, in float32."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes and how they are compiled."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def is_even(self, k: int, *widths: int) -> bool:
        """Return whether no tile reaches over the end of K or of a matrix's columns."""
        return k % self.k == 0 and all(width % self.n == 0 for width in widths)


def tiles_for(dtype: torch.dtype, rows: int, capability: int, *, plain: bool = True) -> Tiles:
    """Tile sizes for ``rows`` rows of one rank. ``capability`` is 80, 90, 100 ...

    ``plain`` says that there is no mask, bias or activation, which would spill beside the widest tile.

    128 x 256 takes 147,456 bytes of shared memory with three stages of 64, and 196,608 with four, which an H100 has too
    (227 KiB); an A100 has 164 KiB and no warp-group products, a capability of 8.6, 8.9 or 12.0 has 100 KiB.
    """
    if dtype == torch.float32:
        return Tiles(64, 64, 32, warps=4, stages=3)
    if rows <= 64:
        return Tiles(64, 128, 64, warps=4, stages=4)
    if plain and 90 <= capability < 120:
        return Tiles(128, 256, 64, warps=8, stages=3)
    return Tiles(128, 128, 64, warps=8, stages=3)


def mode_of(mode: int, dtype: torch.dtype) -> int:
    """The workspace's mode, or TF32 where this process multiplies float32 numbers so."""
    if mode != dev.REAL.value or dtype != torch.float32:
        return mode
    in_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return int(dev.TF32.value) if in_tf32 else mode


def capability_of(place: torch.device) -> int:
    """Compute capability times ten; that of an H100 where there is no device to ask."""
    if place.type != "cuda" or not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(place)
    return 10 * major + minor


def multiprocessors(place: torch.device) -> int:
    """Programs that fit on the device at once, at one for each multiprocessor."""
    if place.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(place).multi_processor_count)
