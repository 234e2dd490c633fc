"""``inductor_passes::reduce_chunks``: the sum of chunks that lie in one buffer, at the speed of memory.

The last step of a reduce-scatter whose parts were pushed here. Adds in float32 in the order of chunks and
rounds once. ``matmul_reduce_scatter`` runs the same kernel with waits in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inductor_passes.kernels.workspace import DTYPES

BLOCK = 2048


@triton.jit
def add_chunks(
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    n: tl.tensor,
    factor: tl.tensor,
    COUNT: tl.constexpr,
) -> None:
    """Elements ``at`` of ``COUNT`` chunks of ``n`` elements each: their sum times ``factor``."""
    n = tl.cast(n, tl.int64)
    total = tl.load(chunks_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for chunk in tl.static_range(1, COUNT):
        part = tl.load(chunks_ptr + chunk * n + at, mask=mask, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + at, (total * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_chunks_kernel(
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum ``COUNT`` chunks of ``n`` elements, one block a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    add_chunks(chunks_ptr, out_ptr, at, at < n, n, 1.0, COUNT)


def launch_reduce_chunks(chunks: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """Run the kernel on contiguous ``chunks``."""
    out = chunks.new_empty(chunks.shape[1:])
    n = out.numel()
    reduce_chunks_kernel[(triton.cdiv(n, block),)](
        chunks, out, n, COUNT=chunks.shape[0], BLOCK=block, num_warps=8
    )
    return out


@torch.library.custom_op("inductor_passes::reduce_chunks", mutates_args=())
def reduce_chunks(chunks: torch.Tensor) -> torch.Tensor:
    """Sum ``chunks`` ``[count, ...]`` to ``[...]``, rounded once. Where the kernel cannot run, eager does."""
    if chunks.device.type != "cuda" or chunks.dtype not in DTYPES or chunks.numel() == 0:
        return reference(chunks)
    return launch_reduce_chunks(chunks.contiguous())


@reduce_chunks.register_fake
def _(chunks: torch.Tensor) -> torch.Tensor:
    return chunks.new_empty(chunks.shape[1:])


def reference(chunks: torch.Tensor) -> torch.Tensor:
    """The same in eager torch."""
    accumulate = torch.float32 if chunks.is_floating_point() else chunks.dtype
    return chunks.sum(0, dtype=accumulate).to(chunks.dtype)
