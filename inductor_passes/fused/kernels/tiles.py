"""Compute the product of one tile, loaded by threads or by the tensor memory accelerator, and
choose tile sizes.

On Hopper and later the copy of a tile takes one instruction of one thread, and addresses no
registers: on an H100 a product of large matrices runs at 0.97 of cuBLAS, and at 0.81 where threads
copy (measured, ``tools/bench/results/gpu.json``). What lies outside a matrix reads as zeros and is
not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inductor_passes.fused.kernels import device as dev

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
        # Masks in the inner loop cost registers and keep loads from being as wide as they could be.
        if EVEN:
            acc = dev.mma(tl.load(a), tl.load(b), acc, MODE)
        else:
            left = K - k * BK
            inside_a = rk[None, :] < left
            # Both operands are masked along K: a zero times whatever lies behind the other's end
            # could be NaN.
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

    ``plain`` says that there is no mask, bias or activation, which would spill beside the widest
    tile.

    128 x 256 takes 147,456 bytes of shared memory with three stages of 64, and 196,608 with four,
    which an H100 has too (227 KiB); an A100 has 164 KiB and no warp-group products, a capability of
    8.6, 8.9 or 12.0 has 100 KiB.
    """
    # Twice the bytes in shared memory, and products in full precision run without tensor cores.
    if dtype == torch.float32:
        return Tiles(64, 64, 32, warps=4, stages=3)
    if rows <= 64:
        return Tiles(64, 128, 64, warps=4, stages=4)
    # Below 90 there are no warp-group products, and from 120 on (consumer Blackwell) 100 KiB of
    # shared memory: neither holds the widest tile.
    if plain and 90 <= capability < 120:
        return Tiles(128, 256, 64, warps=8, stages=3)
    return Tiles(128, 128, 64, warps=8, stages=3)


def mode_of(mode: int, dtype: torch.dtype) -> int:
    """The workspace's mode, or TF32 where this process multiplies float32 numbers so."""
    if mode != dev.REAL.value or dtype != torch.float32:
        return mode
    # The user's setting for products counts for the fused one too.
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


LEAST_CAPABILITY = 90
ALIGNMENT = 16  # bytes, of an address and of every stride but the last
# Time of half a tile's columns over that of the tile, about: its rows are read as often.
HALF_SHARE = 0.58


@triton.jit
def described_product(
    a_desc: tl.tensor_descriptor,
    b_desc: tl.tensor_descriptor,
    a_first: tl.tensor,
    a_second: tl.tensor,
    b_first: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    B_ROWS_LIE: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """``[BM, BN]`` in float32: rows from ``row`` on times columns from ``col`` on.

    a is ``[.., .., rows, K]``, b ``[.., K, columns]``, or ``[.., columns, K]`` unless
    ``B_ROWS_LIE``; the first indices choose the matrix.
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = a_desc.load([a_first, a_second, row, k * BK]).reshape(BM, BK)
        if B_ROWS_LIE:
            b = b_desc.load([b_first, k * BK, col]).reshape(BK, BN)
        else:
            b = b_desc.load([b_first, col, k * BK]).reshape(BN, BK).T
        acc = dev.mma(a, b, acc, MODE)
    return acc


@triton.jit
def tile_of(t: tl.tensor, high: tl.tensor, wide: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Row and column of the ``t``-th tile of ``high`` by ``wide``: down ``GROUP`` rows, then one
    column on.

    Tiles in flight then share rows and columns, which the cache holds.
    """
    per_group = GROUP * wide
    first = t // per_group * GROUP
    group_high = tl.minimum(high - first, GROUP)
    within = t % per_group
    return first + within % group_high, within // group_high


@triton.jit
def fence(zero: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """Return 0, once bulk copies see what ordinary stores have written and this program has
    acquired.
    """
    if MODE == dev.REAL:
        zero = tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;",
            "=r,r",
            [zero],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return zero


def can_describe(capability: int, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Return whether descriptors can address ``a`` ``[.., K]``, weights ``[K, N]`` and the results.

    The answer depends only on what all ranks of a program share, such as shapes and strides. Ranks
    that choose different tiles would count differently. The address of a tensor is rank-dependent;
    ``aligned`` takes care of it.
    """
    if capability < LEAST_CAPABILITY or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    unit = ALIGNMENT // a.element_size()
    return a.shape[-1] % unit == 0 and all(
        weight.shape[1] % unit == 0
        and (
            (weight.stride(0) == 1 and weight.stride(1) % unit == 0)
            or (weight.stride(1) == 1 and weight.stride(0) % unit == 0)
        )
        for weight in (*weights, a)
    )


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, or a copy in the same dimension order if its address is not aligned.

    A descriptor can begin only at a multiple of ``ALIGNMENT`` bytes.
    """
    if matrix.data_ptr() % ALIGNMENT == 0:
        return matrix
    whole = torch.contiguous_format
    if rows_lie(matrix):
        return matrix.clone(memory_format=whole)
    return matrix.t().clone(memory_format=whole).t()


def describe(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    """A descriptor of what lies from ``tensor``'s first element on, by elements."""
    return TensorDescriptor(tensor, list(shape), list(strides), list(block))


def describe_weight(weight: torch.Tensor, tiles: Tiles, *, stacked: int = 1) -> TensorDescriptor:
    """A descriptor of ``stacked`` weights ``[K, N]`` one below the other, read along the stride
    that is 1.
    """
    k, n = weight.shape[0] // stacked, weight.shape[1]
    if rows_lie(weight):
        row = weight.stride(0)
        return describe(weight, (stacked, k, n), (k * row, row, 1), (1, tiles.k, tiles.n))
    col = weight.stride(1)
    return describe(weight, (1, n, k), (n * col, col, 1), (1, tiles.n, tiles.k))


def rows_lie(weight: torch.Tensor) -> bool:
    """Return whether a weight's rows lie in one piece; else its columns do."""
    return weight.stride(1) == 1


def tma_tiles(rows: int, *, plain: bool = True) -> Tiles:
    """Tile sizes for products of ``rows`` rows of each rank.

    ``plain`` says that there is no bias or activation, which would spill beside the widest tile.
    """
    if rows <= 64:
        return Tiles(64, 128, 64, warps=4, stages=4)
    return Tiles(128, 256 if plain else 128, 64, warps=8, stages=4)


def whole_tiles(rows: int, widths: Sequence[int], world: int, programs: int, tiles: Tiles) -> int:
    """How many tiles to multiply whole; those after them are multiplied in halves of their columns.

    The last wave of whole tiles may leave most of the device idle, where halves would share it out.
    A half takes more than half the time.
    """
    count = (
        world * triton.cdiv(rows, tiles.m) * sum(triton.cdiv(width, tiles.n) for width in widths)
    )

    def waves(whole: int) -> float:
        return triton.cdiv(whole, programs) + HALF_SHARE * triton.cdiv(
            2 * (count - whole), programs
        )

    return int(min((count, count // programs * programs, 0), key=waves))
