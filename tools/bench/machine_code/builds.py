"""The kernels as they are launched for common shapes: what is compiled ahead of time and gated."""

from __future__ import annotations

from typing import Any

import torch

from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import all_reduce_add_norm as norm
from inductor_passes.fused.kernels import gather_tma, push_tiles
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels import tiles as tma
from inductor_passes.fused.kernels.tiles import Tiles, tiles_for
from inductor_passes.fused.kernels.workspace import PROGRAMS
from machine_code.ahead import Build, Facts, compile_build

CAPABILITIES = (80, 90, 100)
WORLD = 8
_SHARED: dict[str, str] = {"peers_ptr": "*i64", "state_ptr": "*i32", "half_bytes": "i64"}


def builds(capability: int) -> list[Build]:
    """Every kernel, in bfloat16 on eight ranks."""
    return [
        *(
            _norm(capability, two_shot, layer)
            for two_shot in (False, True)
            for layer in (False, True)
        ),
        _gather(capability, 1),
        _gather(capability, gather.MAX_WEIGHTS),
        _gather(capability, gather.MAX_WEIGHTS, plain=False),
        *_scatter(capability),
        *(_described() if capability >= tma.LEAST_CAPABILITY else []),
    ]


def facts_of(name: str, capability: int) -> Facts:
    """Compile the build of that name. A function of plain values, for a pool of processes."""
    (build,) = [b for b in builds(capability) if b.name == name]
    return compile_build(build, capability)[0]


def _norm(capability: int, two_shot: bool, layer: bool) -> Build:
    pointers: tuple[str, ...] = ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr")
    constants: dict[str, Any] = {
        "bias_ptr": None,
        "scale_ptr": None,
        "WORLD": WORLD,
        "PROGRAMS": PROGRAMS,
        "BLOCK": 8192,
        "TWO_SHOT": two_shot,
        "MODE": 0,
    }
    if layer:
        pointers = (*pointers, "shift_ptr")
    else:
        constants |= {"shift_ptr": None, "mean_ptr": None}
    return Build(
        f"all_reduce_add_{'layer' if layer else 'rms'}norm {'two' if two_shot else 'one'}-shot",
        norm.all_reduce_add_norm_kernel,
        {
            **dict.fromkeys(pointers, "*bf16"),
            "mean_ptr": "*fp32",
            "rstd_ptr": "*fp32",
            "rows": "i32",
            "D": "i32",
            "eps": "fp32",
            **_SHARED,
        },
        constants,
        (*pointers, "D", "half_bytes"),
        warps=norm.warps(8192, capability),
    )


def _gather(capability: int, weights: int, *, plain: bool = True) -> Build:
    tiles = tiles_for(torch.bfloat16, 1024, capability, plain=plain)
    biases = tuple(f"bias{i}_ptr" for i in range(gather.MAX_WEIGHTS))
    pointers = ("a_ptr", *(f"{p}{i}_ptr" for p in "bc" for i in range(gather.MAX_WEIGHTS)))
    sizes = ("M", "K", *(f"N{i}" for i in range(gather.MAX_WEIGHTS)))
    rows = tuple(f"b_row{i}" for i in range(gather.MAX_WEIGHTS))
    cols = tuple(f"b_col{i}" for i in range(gather.MAX_WEIGHTS))
    return Build(
        f"all_gather_matmul {weights} "
        f"weight{'s' * (weights > 1)}{'' if plain else ', bias, gelu, ragged'}",
        gather.all_gather_matmul_kernel,
        {
            **dict.fromkeys((*pointers, *biases), "*bf16"),
            **dict.fromkeys((*sizes, *cols, "chunk_tiles"), "i32"),
            **_SHARED,
        },
        {
            **dict.fromkeys(rows, 1),  # a linear layer's weight, transposed
            **(dict.fromkeys(biases) if plain else {}),
            "WORLD": WORLD,
            "PROGRAMS": 132,
            "COPIERS": gather_tma.COPIERS,
            "COPY_BLOCK": gather_tma.COPY_BLOCK,
            "WEIGHTS": weights,
            "ACTIVATION": "none" if plain else "gelu",
            "BM": tiles.m,
            "BN": tiles.n,
            "BK": tiles.k,
            "EVEN": plain,
            "MODE": 0,
        },
        (*pointers, *sizes, *cols, "half_bytes"),
        warps=tiles.warps,
        stages=tiles.stages,
        tensor_cores=True,
        wide_loads=plain,  # a bias of any length is loaded by elements
    )


def _scatter(capability: int) -> list[Build]:
    tiles = tiles_for(torch.bfloat16, 1024, capability)
    push = Build(
        "matmul_reduce_scatter push",
        push_tiles.push_tiles_kernel,
        {
            "a_ptr": "*bf16",
            "b_ptr": "*bf16",
            **dict.fromkeys(("M", "N", "K", "b_col"), "i32"),
            **_SHARED,
        },
        {
            "b_row": 1,
            "WORLD": WORLD,
            "PROGRAMS": 132,
            "BM": tiles.m,
            "BN": tiles.n,
            "BK": tiles.k,
            "EVEN": True,
            "MODE": 0,
        },
        ("a_ptr", "b_ptr", "M", "N", "K", "b_col", "half_bytes"),
        warps=tiles.warps,
        stages=tiles.stages,
        tensor_cores=True,
    )
    add = Build(
        "matmul_reduce_scatter reduce",
        scatter.reduce_parts_kernel,
        {"out_ptr": "*bf16", "n": "i32", "tiles": "i32", "factor": "fp32", **_SHARED},
        {"WORLD": WORLD, "PROGRAMS": 132, "BLOCK": scatter.BLOCK, "MODE": 0},
        ("out_ptr", "n", "half_bytes"),
        warps=8,
    )
    return [push, add]


def _described() -> list[Build]:
    """Products whose tiles move by descriptors: Hopper and later."""
    found = []
    for wide, weights in ((256, 1), (256, gather.MAX_WEIGHTS)):
        found.append(_gather_described(Tiles(128, wide, 64, warps=8, stages=4), weights))
    found.append(_gather_described(Tiles(64, 128, 64, warps=4, stages=4), 1))
    found.append(
        _gather_described(tma.tma_tiles(1024, plain=False), gather.MAX_WEIGHTS, plain=False)
    )
    tiles = Tiles(128, 256, 64, warps=8, stages=4)
    push = Build(
        "matmul_reduce_scatter push by descriptors",
        push_tiles.push_tiles_tma_kernel,
        {
            "a_desc": f"tensordesc<bf16[1, 1, {tiles.m}, {tiles.k}]>",
            "b_desc": f"tensordesc<bf16[1, {tiles.n}, {tiles.k}]>",
            **dict.fromkeys(("M", "N", "K"), "i32"),
            **_SHARED,
        },
        {
            "WORLD": WORLD,
            "PROGRAMS": 132,
            "BM": tiles.m,
            "BN": tiles.n,
            "BK": tiles.k,
            "B_ROWS_LIE": False,
            "MODE": 0,
        },
        ("M", "N", "K", "half_bytes"),
        warps=tiles.warps,
        stages=tiles.stages,
        tensor_cores=True,
        wide_loads=False,  # descriptors load
    )
    return [*found, push]


def _gather_described(tiles: Tiles, weights: int, *, plain: bool = True) -> Build:
    count = gather.MAX_WEIGHTS
    tile = f"tensordesc<bf16[1, 1, {tiles.m}, {tiles.k}]>"
    signature = {
        "a_ptr": "*bf16",
        "a_desc": tile,
        "rows_desc": tile,
        **{f"b{i}_desc": f"tensordesc<bf16[1, {tiles.n}, {tiles.k}]>" for i in range(count)},
        **{
            f"half{i}_desc": f"tensordesc<bf16[1, {tiles.n // 2}, {tiles.k}]>" for i in range(count)
        },
        **{f"c{i}_desc": f"tensordesc<bf16[1, {tiles.m}, {tiles.n // 2}]>" for i in range(count)},
        **{f"bias{i}_ptr": "*bf16" for i in range(count)},
        **dict.fromkeys(
            ("M", "K", *(f"N{i}" for i in range(count)), "chunk_tiles", "whole"), "i32"
        ),
        **_SHARED,
    }
    return Build(
        f"all_gather_matmul by descriptors, {weights} x {tiles.m} x "
        f"{tiles.n}{'' if plain else ', bias, gelu'}",
        gather_tma.all_gather_matmul_tma_kernel,
        signature,
        {
            **({f"bias{i}_ptr": None for i in range(count)} if plain else {}),
            "WORLD": WORLD,
            "COPIERS": gather_tma.COPIERS,
            "COPY_BLOCK": gather_tma.COPY_BLOCK,
            "WEIGHTS": weights,
            "ACTIVATION": "none" if plain else "gelu",
            "BM": tiles.m,
            "BN": tiles.n,
            "BK": tiles.k,
            "GROUP": gather_tma.GROUP,
            "B_ROWS_LIE": False,
            "MODE": 0,
        },
        ("a_ptr", "M", "K", *(f"N{i}" for i in range(count)), "half_bytes"),
        warps=tiles.warps,
        stages=tiles.stages,
        tensor_cores=True,
        wide_loads=plain,
    )
