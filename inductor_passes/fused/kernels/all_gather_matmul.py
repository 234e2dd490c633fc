"""``inductor_passes::all_gather_matmul``: rows of all ranks times weights, without waiting for all
rows.

One launch. Its first programs push this rank's rows to every peer, chunk by chunk, and set a flag
there for each chunk. The others multiply: tiles of this rank's own rows first, then those of the
peers in the order in which they come in, waiting for the chunk of each tile. Several weights share
one gather. On Hopper and later, tiles are moved by descriptors, and programs that have pushed
multiply too: ``gather_tma.py``.

The wait stands in the loop over tiles and the loop over K is pipelined: where the two are flattened
into one loop, the compiler moves loads of a tile above its wait. The programs that push wait for
nothing and come first in the grid, so a launch that is not resident as a whole still ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import gather_tma
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.gather_tma import (
    COPIERS,
    COPY_BLOCK,
    MAX_CHUNKS,
    MAX_WEIGHTS,
    padded,
    push_rows,
)
from inductor_passes.fused.kernels.tiles import (
    ACTIVATIONS,
    Tiles,
    activate,
    capability_of,
    mode_of,
    multiprocessors,
    tile_product,
    tiles_for,
)
from inductor_passes.fused.kernels.workspace import Workspace, find_workspace

FAMILY = "all_gather_matmul"
c10d = torch.ops._c10d_functional


@triton.jit
def all_gather_matmul_kernel(
    a_ptr: tl.tensor,
    b0_ptr: tl.tensor,
    b1_ptr: tl.tensor,
    b2_ptr: tl.tensor,
    bias0_ptr: tl.tensor,
    bias1_ptr: tl.tensor,
    bias2_ptr: tl.tensor,
    c0_ptr: tl.tensor,
    c1_ptr: tl.tensor,
    c2_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    M: tl.tensor,
    N0: tl.tensor,
    N1: tl.tensor,
    N2: tl.tensor,
    K: tl.tensor,
    b_row0: tl.tensor,
    b_row1: tl.tensor,
    b_row2: tl.tensor,
    b_col0: tl.tensor,
    b_col1: tl.tensor,
    b_col2: tl.tensor,
    half_bytes: tl.tensor,
    chunk_tiles: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COPIERS: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """``M`` rows of this rank; c has ``WORLD * M``. A chunk is ``chunk_tiles`` tiles high.

    Virtual ranks are axis 1 of the grid; their a and c lie end to end, weights are shared.
    """
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    program = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    a_ptr += local * M * K
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    dev.open_counter(state_ptr, program, epoch & 1)  # for a call by descriptors that may be next
    high = tl.cdiv(M, BM)
    if program < COPIERS:
        push_rows(
            a_ptr,
            peers_ptr,
            state_ptr,
            rank,
            half,
            epoch,
            program,
            tl.cast(M, tl.int64) * K,
            tl.cast(chunk_tiles, tl.int64) * BM * K,
            tl.cdiv(high, chunk_tiles),
            WORLD,
            COPIERS,
            COPY_BLOCK,
            DTYPE,
        )
    else:
        wide0 = tl.cdiv(N0, BN)
        wide1 = wide0
        wide = wide0
        if WEIGHTS > 1:
            wide1 = wide0 + tl.cdiv(N1, BN)
            wide = wide1
        if WEIGHTS > 2:
            wide = wide1 + tl.cdiv(N2, BN)
        gathered = dev.data_of(peers_ptr, rank, half, DTYPE)
        flags = dev.flags_of(peers_ptr, rank)
        per_rank = high * wide
        per_chunk = chunk_tiles * wide
        # ``flatten=False``: flattened with the loop over K, the compiler would prefetch a tile's
        # rows above its wait.
        for t in tl.range(program - COPIERS, WORLD * per_rank, PROGRAMS - COPIERS, flatten=False):
            source = (rank + t // per_rank) % WORLD
            chunk = t % per_rank // per_chunk
            within = t % per_rank - chunk * per_chunk
            chunk_high = tl.minimum(chunk_tiles, high - chunk * chunk_tiles)
            # Down the rows of a chunk first: neighbouring programs share the columns of the weight
            # in the cache, and need one chunk after the other.
            first_row = (chunk * chunk_tiles + within % chunk_high) * BM
            n = within // chunk_high
            b_ptr = b0_ptr
            bias_ptr = bias0_ptr
            c_ptr = c0_ptr
            N = N0
            b_row = b_row0
            b_col = b_col0
            first_col = n * BN
            if WEIGHTS > 1:
                # Selected by value, not by branches: the loop over K then exists once, with one set
                # of pipeline stages in shared memory.
                b_ptr = tl.where(n < wide0, b_ptr, b1_ptr)
                c_ptr = tl.where(n < wide0, c_ptr, c1_ptr)
                N = tl.where(n < wide0, N, N1)
                b_row = tl.where(n < wide0, b_row, b_row1)
                b_col = tl.where(n < wide0, b_col, b_col1)
                first_col = tl.where(n < wide0, n, n - wide0) * BN
                if bias_ptr is not None:
                    bias_ptr = tl.where(n < wide0, bias_ptr, bias1_ptr)
            if WEIGHTS > 2:
                b_ptr = tl.where(n < wide1, b_ptr, b2_ptr)
                c_ptr = tl.where(n < wide1, c_ptr, c2_ptr)
                N = tl.where(n < wide1, N, N2)
                b_row = tl.where(n < wide1, b_row, b_row2)
                b_col = tl.where(n < wide1, b_col, b_col2)
                first_col = tl.where(n < wide1, first_col, (n - wide1) * BN)
                if bias_ptr is not None:
                    bias_ptr = tl.where(n < wide1, bias_ptr, bias2_ptr)
            rows_ptr = a_ptr
            poison = 0.0
            if source != rank:
                flag = flags + source * MAX_CHUNKS + chunk
                ok = dev.flag_wait(flag, epoch, 1, source, chunk, state_ptr, MODE)
                rows_ptr = gathered + tl.cast(source, tl.int64) * M * K
                poison = tl.where(ok, 0.0, float("nan"))
            acc = tile_product(
                rows_ptr + tl.cast(first_row, tl.int64) * K,
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
                MODE,
            )
            col = tl.arange(0, BN)
            inside = col < N - first_col
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + first_col + col, mask=inside, other=0.0)
                acc += bias.to(tl.float32)[None, :]
            acc = activate(acc, ACTIVATION) + poison
            row = tl.arange(0, BM)
            out_row = (local * WORLD + source) * M + first_row
            out = c_ptr + out_row * N + first_col + row[:, None] * N + col[None, :]
            tl.store(out, acc.to(DTYPE), mask=(row < M - first_row)[:, None] & inside[None, :])
    dev.finish(state_ptr, program, epoch)


@triton.jit
def read_gathered_kernel(
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    n: tl.tensor,
    half_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The rows of all ranks, ``n`` elements each, after the product that has waited for them.

    Axis 1 of the grid is the rank whose rows are copied, axis 2 the virtual rank.
    """
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    source = tl.program_id(1).to(tl.int64)
    local = tl.program_id(2).to(tl.int64)
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    # The product before has stored its epoch: the rows lie in the half that it used, until the call
    # after the next.
    half = tl.cast(tl.load(state_ptr + dev.EPOCHS) & 1, tl.int64) * half_bytes
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows_ptr = dev.data_of(peers_ptr, rank, half, DTYPE) + source * n
    rows_ptr = tl.where(source == rank, a_ptr + local * n, rows_ptr)
    out_ptr += (local * tl.num_programs(1) + source) * n
    tl.store(out_ptr + at, tl.load(rows_ptr + at, mask=at < n), mask=at < n)


def launch_all_gather_matmul(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    workspace: Workspace,
    *,
    activation: str = "none",
    gather: bool = False,
    tiles: Tiles,
    copiers: int | None = None,
    copy_block: int = COPY_BLOCK,
    descriptors: bool = False,
) -> list[torch.Tensor]:
    """Run the kernel. ``a`` is contiguous ``[rows, K]``: this rank's, or those of virtual ranks
    stacked.

    ``descriptors`` moves tiles by the tensor memory accelerator: for what ``tma.can_describe``
    accepts. Returns one product for each weight, ``[WORLD * rows, N]``, and with ``gather`` the
    gathered rows.
    """
    ranks, world = workspace.local_ranks, workspace.world
    m, k = a.shape[0] // ranks, a.shape[1]
    outs = [a.new_empty(a.shape[0] * world, weight.shape[1]) for weight in weights]
    launch = gather_tma.launch if descriptors else _launch_by_threads
    launch(
        a,
        weights,
        biases,
        outs,
        workspace,
        activation=activation,
        tiles=tiles,
        copiers=copiers,
        copy_block=copy_block,
    )
    if gather:
        gathered = a.new_empty(a.shape[0] * world, k)
        read_gathered_kernel[(triton.cdiv(m * k, copy_block), world, ranks)](
            a,
            gathered,
            workspace.peers,
            workspace.state,
            m * k,
            workspace.half_bytes,
            BLOCK=copy_block,
            num_warps=8,
        )
        outs.append(gathered)
    return outs


def _launch_by_threads(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    workspace: Workspace,
    *,
    activation: str,
    tiles: Tiles,
    copiers: int | None,
    copy_block: int,
) -> None:
    ranks, world = workspace.local_ranks, workspace.world
    m, k = a.shape[0] // ranks, a.shape[1]
    high = triton.cdiv(m, tiles.m)
    widths = [weight.shape[1] for weight in weights]
    all_gather_matmul_kernel[(workspace.programs, ranks)](
        a,
        *padded(weights),
        *padded(biases or [None]),
        *padded(outs),
        workspace.peers,
        workspace.state,
        m,
        *padded(widths),
        k,
        *padded([weight.stride(0) for weight in weights]),
        *padded([weight.stride(1) for weight in weights]),
        workspace.half_bytes,
        triton.cdiv(high, MAX_CHUNKS.value),
        WORLD=world,
        PROGRAMS=workspace.programs,
        COPIERS=COPIERS if copiers is None else copiers,
        COPY_BLOCK=copy_block,
        WEIGHTS=len(weights),
        ACTIVATION=activation,
        BM=tiles.m,
        BN=tiles.n,
        BK=tiles.k,
        EVEN=tiles.is_even(k, *widths),
        MODE=mode_of(workspace.mode, a.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_cooperative_grid=ranks > 1,
    )


@torch.library.custom_op("inductor_passes::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    gather: bool,
    group_name: str,
    group_size: int,
) -> list[torch.Tensor]:
    """``activation(all_gather(a) @ weight + bias)`` for up to three weights.

    ``a`` ``[rows, K]`` (local), each weight ``[K, N]``, a bias ``[N]`` for each weight or none at
    all; results ``[group_size * rows, N]``, then with ``gather`` the gathered ``a``. Raises
    KernelError for shapes that do not fit together. Where the kernel cannot run, torch's own
    operations do.
    """
    _check(a, weights, biases, activation)
    workspace = None
    if can_read(weights):
        workspace = find_workspace(
            FAMILY,
            a,
            group_name,
            group_size * a.numel() * a.element_size(),
            programs=multiprocessors(a.device),
            flags=MAX_CHUNKS.value,
        )
    if workspace is None:
        return reference(a, weights, biases, activation, gather, group_name, group_size)
    a, capability = a.contiguous(), capability_of(a.device)
    widths = [weight.shape[1] for weight in weights]
    descriptors = tma.can_describe(capability, a, weights)
    if descriptors:
        a, *weights = map(tma.aligned, (a, *weights))
    plain = not biases and activation == "none"
    if descriptors:
        tiles = tma.tma_tiles(a.shape[0], plain=plain)
    else:
        even = tiles_for(a.dtype, a.shape[0], capability).is_even(a.shape[1], *widths)
        tiles = tiles_for(a.dtype, a.shape[0], capability, plain=plain and even)
    return launch_all_gather_matmul(
        a,
        weights,
        [bias.contiguous() for bias in biases],
        workspace,
        activation=activation,
        gather=gather,
        tiles=tiles,
        descriptors=descriptors,
    )


@all_gather_matmul.register_fake
def _(a: torch.Tensor, weights: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    biases, activation, gather, _, group_size = how
    _check(a, weights, biases, activation)
    rows = a.shape[0] * group_size
    outs = [a.new_empty((rows, weight.shape[1])) for weight in weights]
    return [*outs, a.new_empty((rows, a.shape[1]))] if gather else outs


def can_read(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernel can read these weights without a copy.

    It can if one dimension has stride 1, and that dimension is the same in all weights.
    """
    return all(w.stride(0) == 1 for w in weights) or all(w.stride(1) == 1 for w in weights)


def _check(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
) -> None:
    fits = (
        a.dim() == 2
        and 0 < len(weights) <= MAX_WEIGHTS
        and all(w.dim() == 2 and w.shape[0] == a.shape[1] for w in weights)
        and all(t.dtype == a.dtype for t in (*weights, *biases))
        and [b.shape for b in biases] in ([], [w.shape[1:] for w in weights])
        and activation in ACTIVATIONS
    )
    if not fits:
        given = [
            ", ".join(f"{list(t.shape)} {t.dtype}" for t in tensors) or "none"
            for tensors in (weights, biases)
        ]
        raise KernelError(
            f"all_gather_matmul got a {list(a.shape)} {a.dtype}, weights {given[0]}, "
            f"biases {given[1]} and activation {activation!r}.",
            f"It takes [rows, K] and one to {MAX_WEIGHTS} weights [K, N] of one dtype, a bias [N] "
            f"for each or none, and one of {', '.join(ACTIVATIONS)}.",
            "Cast to one dtype and reshape to two dimensions first.",
        )


def reference(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
    gather: bool,
    group_name: str,
    group_size: int,
) -> list[torch.Tensor]:
    """The same with torch's own collective and products."""
    launch = c10d.all_gather_into_tensor(a.contiguous(), group_size, group_name)
    gathered = c10d.wait_tensor(launch)
    outs = products(gathered, weights, biases, activation)
    return [*outs, gathered] if gather else outs


def products(
    gathered: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    activation: str,
) -> list[torch.Tensor]:
    """Compute the products that follow the gather, with biases and activation."""
    outs = [gathered @ weight for weight in weights]
    if biases:
        outs = [out + bias for out, bias in zip(outs, biases, strict=True)]
    if activation == "none":
        return outs
    fn = {
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
    }[activation]
    return [fn(out) for out in outs]
