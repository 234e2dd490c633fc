"""``inductor_passes::all_reduce_add_rmsnorm`` and ``..._layernorm``: a sum over ranks, and what
reads it.

The sum of the ranks' inputs, plus an optional bias, plus an optional residual, rounded to the type
of the input; that total is an output, and so are its norm and the statistics that a backward pass
wants. The unfused chain rounds the sum before it adds, and its norm once more before the weight;
this rounds the total and the norm, nothing between. One-shot reads every rank's row; under
two-shot, for larger messages, each rank sums a share of the rows. Adding in the order of ranks
gives every rank identical bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels.tiles import capability_of
from inductor_passes.fused.kernels.workspace import Workspace, find_workspace

# A row is held in registers, by at most 1024 threads of 64 registers.
MAX_ROW = 16384
# Above this many bytes a rank two-shot moves less; below, its second barrier costs more than it
# saves.
TWO_SHOT_BYTES = 512 << 10
E4M3_MAX = 448.0
# A row of zeros has a scale too.
SMALLEST = 1e-12


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as contiguous ``[rows, D]``."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


class Norm(NamedTuple):
    """Describe the norm of a sum: its optional terms and its result.

    ``layer`` selects a layer norm instead of an RMS norm. ``residual`` has the shape of the sum,
    ``[..., D]``; ``bias``, ``weight`` and ``shift`` are ``[D]``. The result has the dtype
    ``out_dtype``. With float8_e4m3fn each row has a scale, and the result times the scale is the
    norm.
    """

    residual: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    eps: float = 1e-5
    out_dtype: torch.dtype = torch.float32
    layer: bool = False

    @property
    def quantised(self) -> bool:
        """Return whether rows have scales."""
        return self.out_dtype == torch.float8_e4m3fn

    def rows(self) -> dict[str, torch.Tensor | None]:
        """The terms of one row, by field."""
        return {"bias": self.bias, "weight": self.weight, "shift": self.shift}

    def contiguous(self) -> Norm:
        """The terms as a kernel reads them: the residual ``[rows, D]``, every row with stride 1."""
        bias, weight, shift = (
            None if row is None else row.contiguous() for row in self.rows().values()
        )
        residual = None if self.residual is None else matrix(self.residual)
        return self._replace(residual=residual, bias=bias, weight=weight, shift=shift)

    def outputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the results of ``x`` ``[..., D]``: y and total like x; mean, rstd and scale
        ``[..., 1]``, float32.

        Mean is empty unless ``layer``, scale unless ``quantised``.
        """
        wanted = (self.layer, True, self.quantised)
        row, none = (*x.shape[:-1], 1), (0,)
        statistics = (x.new_empty(row if there else none, dtype=torch.float32) for there in wanted)
        return [x.new_empty(x.shape, dtype=self.out_dtype), x.new_empty(x.shape), *statistics]

    def of(self, summed: torch.Tensor) -> list[torch.Tensor]:
        """The results for a sum, by eager operations, in float32 where the kernel is."""
        exact = summed.float()
        for term in (self.bias, self.residual):
            exact = exact if term is None else exact + term.float()
        total = exact.to(summed.dtype)
        centred = total.float()
        mean = scale = centred.new_empty(0)
        if self.layer:
            mean = centred.mean(-1, keepdim=True)
            centred = centred - mean
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        y = centred * rstd
        y = y if self.weight is None else y * self.weight.float()
        y = y if self.shift is None else y + self.shift.float()
        if self.quantised:
            scale = y.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / E4M3_MAX
            y = y / scale
        return [y.to(self.out_dtype), total, mean, rstd, scale]


FAMILY = "all_reduce_add_norm"
c10d = torch.ops._c10d_functional
LARGEST = tl.constexpr(E4M3_MAX)
FLOOR = tl.constexpr(SMALLEST)


@triton.jit
def all_reduce_add_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    y_ptr: tl.tensor,
    total_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    peers_ptr: tl.tensor,
    state_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.tensor,
    eps: tl.tensor,
    half_bytes: tl.tensor,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """Rows of ``D`` elements. A pointer may be None: then that input or output is not there.

    With ``mean_ptr`` it is a layer norm. With ``scale_ptr`` y is float8 and each row has a scale.
    Virtual ranks are axis 1 of the grid; their tensors of ``rows`` lie end to end, weights are
    shared. Under two-shot the ``j``-th row of a program is summed by rank ``j % WORLD``.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    local = tl.program_id(1)
    state_ptr += local * dev.STATE_WORDS
    rank = tl.load(state_ptr + dev.RANK)
    epoch = dev.next_epoch(state_ptr, program)
    half = tl.cast(epoch & 1, tl.int64) * half_bytes
    sums = half + half_bytes // 2
    # Rows go around the programs. The same program of every rank has the same rows, so the barrier
    # is between equal programs and not of the whole device.
    mine_rows = tl.cdiv(rows - program, PROGRAMS)
    first_row = tl.cast(local, tl.int64) * rows
    col = tl.arange(0, BLOCK)
    inside = col < D

    mine = dev.data_of(peers_ptr, rank, half, DTYPE)
    for j in range(mine_rows):
        row = tl.cast(j * PROGRAMS + program, tl.int64)
        # A copy into symmetric memory first: peers can read nothing else, and the input is wherever
        # torch's allocator put it.
        part = tl.load(x_ptr + (first_row + row) * D + col, mask=inside)
        tl.store(mine + row * D + col, part, mask=inside)
    ok = dev.pad_barrier(peers_ptr, program, epoch, rank, state_ptr, WORLD, MODE)
    if TWO_SHOT:
        share = dev.data_of(peers_ptr, rank, sums, DTYPE)
        # Each rank sums every ``WORLD``-th row of a program: 2 (n - 1) / n of the bytes cross the
        # link, instead of n - 1 times.
        for j in range(rank, mine_rows, WORLD):
            at = tl.cast(j * PROGRAMS + program, tl.int64) * D + col
            total = dev.sum_over_ranks(peers_ptr, half, at, inside, WORLD, DTYPE)
            tl.store(share + at, total.to(DTYPE), mask=inside)
        slot = PROGRAMS + program
        ok = ok & dev.pad_barrier(peers_ptr, slot, epoch, rank, state_ptr, WORLD, MODE)
    for j in range(mine_rows):
        row = tl.cast(j * PROGRAMS + program, tl.int64)
        at = row * D + col
        if TWO_SHOT:
            share = dev.data_of(peers_ptr, j % WORLD, sums, DTYPE)
            total = tl.load(share + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total = dev.sum_over_ranks(peers_ptr, half, at, inside, WORLD, DTYPE)
        own = (first_row + row) * D + col
        if bias_ptr is not None:
            total += tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + own, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(ok, total, float("nan")).to(DTYPE)
        tl.store(total_ptr + own, total, mask=inside)
        # The norm of what the reader of total gets, so that a backward pass sees one value.
        total = tl.where(inside, total.to(tl.float32), 0.0)
        if mean_ptr is not None:
            mean = tl.sum(total, axis=0) / D
            tl.store(mean_ptr + first_row + row, mean)
            # Lanes beyond the row would each add the square of the mean to the variance.
            total = tl.where(inside, total - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
        tl.store(rstd_ptr + first_row + row, rstd)
        y = total * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if shift_ptr is not None:
            y += tl.load(shift_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            largest = tl.max(tl.abs(tl.where(inside, y, 0.0)), axis=0)
            scale = tl.maximum(largest, FLOOR) / LARGEST
            tl.store(scale_ptr + first_row + row, scale)
            y = y / scale
        tl.store(y_ptr + own, y.to(y_ptr.dtype.element_ty), mask=inside)
    dev.finish(state_ptr, program, epoch)


def launch_all_reduce_add_norm(
    x: torch.Tensor, norm: Norm, workspace: Workspace, *, two_shot: bool
) -> list[torch.Tensor]:
    """Run the kernel; y, total, mean (empty unless a layer norm), rstd, scale (empty unless
    float8).

    ``x`` and ``norm.residual`` are contiguous ``[rows, D]``: this rank's, or those of virtual ranks
    stacked.
    """
    rows, d = x.shape
    outs = norm.outputs(x)
    y, total, mean, rstd, scale = outs
    block = triton.next_power_of_2(d)
    all_reduce_add_norm_kernel[(workspace.programs, workspace.local_ranks)](
        x,
        norm.residual,
        norm.bias,
        norm.weight,
        norm.shift,
        y,
        total,
        mean if norm.layer else None,
        rstd,
        scale if norm.quantised else None,
        workspace.peers,
        workspace.state,
        rows // workspace.local_ranks,
        d,
        norm.eps,
        workspace.half_bytes,
        WORLD=workspace.world,
        PROGRAMS=workspace.programs,
        BLOCK=block,
        TWO_SHOT=two_shot,
        MODE=workspace.mode,
        num_warps=warps(block, capability_of(x.device)),
        launch_cooperative_grid=workspace.local_ranks > 1,
    )
    return outs


def warps(block: int, capability: int) -> int:
    """Warps for a row of ``block`` elements: 8 a thread are one wide load of 16-bit numbers.

    32 warps leave 64 registers a thread, which code for devices before Hopper spills.
    """
    return max(4, min(32 if capability >= 90 else 16, block // 256))


@torch.library.custom_op("inductor_passes::all_reduce_add_rmsnorm", mutates_args=())
def all_reduce_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of (sum of ``x`` over ranks + ``bias`` + ``residual``), local shapes.

    ``x`` and ``residual`` ``[..., D]``, ``bias`` and ``weight`` ``[D]``. Returns y, the total in
    the type of x, the reciprocal root ``[..., 1]`` in float32, and with ``out_dtype`` float8_e4m3fn
    a scale for each row (else an empty tensor): y times scale is the norm.
    """
    norm = _check(x, Norm(residual, bias, weight, None, eps, out_dtype))
    y, total, _, rstd, scale = _run(x, norm, group_name)
    return y, total, rstd, scale


@torch.library.custom_op("inductor_passes::all_reduce_add_layernorm", mutates_args=())
def all_reduce_add_layernorm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the layer norm of (sum of ``x`` over ranks + ``bias`` + ``residual``), local shapes.

    The arguments are those of ``all_reduce_add_rmsnorm``, and ``shift`` ``[D]``, which is added
    last. It returns the same results, with the mean ``[..., 1]`` in float32 before the reciprocal
    root.
    """
    norm = _check(x, Norm(residual, bias, weight, shift, eps, out_dtype, layer=True))
    y, total, mean, rstd, scale = _run(x, norm, group_name)
    return y, total, mean, rstd, scale


@all_reduce_add_rmsnorm.register_fake
def _(x: torch.Tensor, *terms: Any) -> tuple[torch.Tensor, ...]:
    norm = Norm._make((*terms[:3], None, *terms[3:-1], False))
    y, total, _, rstd, scale = _check(x, norm).outputs(x)
    return y, total, rstd, scale


@all_reduce_add_layernorm.register_fake
def _(x: torch.Tensor, *terms: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_check(x, Norm._make((*terms[:-1], True))).outputs(x))


def _run(x: torch.Tensor, norm: Norm, group_name: str) -> list[torch.Tensor]:
    size = x.numel() * x.element_size()
    two_shot = size > TWO_SHOT_BYTES
    workspace = None
    if x.shape[-1] <= MAX_ROW and not (norm.quantised and capability_of(x.device) < 89):
        workspace = find_workspace(FAMILY, x, group_name, size * (2 if two_shot else 1))
    if workspace is None:
        return reference(x, norm, group_name)
    outs = launch_all_reduce_add_norm(matrix(x), norm.contiguous(), workspace, two_shot=two_shot)
    shapes = [x.shape, x.shape, *[(*x.shape[:-1], 1)] * 3]
    return [
        out.view(shape) if out.numel() else out for out, shape in zip(outs, shapes, strict=True)
    ]


def _check(x: torch.Tensor, norm: Norm) -> Norm:
    wanted = x.shape[-1:]
    fits = (
        x.dim() > 0
        and (norm.residual is None or norm.residual.shape == x.shape)
        and all(row is None or row.shape == wanted for row in norm.rows().values())
    )
    if not fits:
        given = {"residual": norm.residual, **norm.rows()}
        shapes = ", ".join(f"{k} {list(t.shape)}" for k, t in given.items() if t is not None)
        raise KernelError(
            f"all_reduce_add_norm got x {list(x.shape)}, {shapes or 'nothing else'}.",
            "It takes a residual of the shape of x, and rows [D] of its last dimension.",
            "Expand what is to be broadcast first.",
        )
    return norm


def reference(x: torch.Tensor, norm: Norm, group_name: str) -> list[torch.Tensor]:
    """The same from torch's own collective and eager operations."""
    return norm.of(c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group_name)))
