"""The kernels compiled ahead of time: the gate on what came out, the committed table, a planted
fault.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

import torch
import triton
import triton.language as tl

from inductor_passes.fused.kernels import device, tiles

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tools" / "bench"))
from machine_code import ahead, builds, hoisting  # noqa: E402 - tools are no package

RESULTS = ROOT / "tools/bench/results"
# All are compiled for Hopper; for the others those whose code differs most. The table holds all of
# them.
ELSEWHERE = (
    "all_gather_matmul 1 weight",
    "matmul_reduce_scatter push",
    "all_reduce_add_rmsnorm two-shot",
)


def wanted():
    for capability in builds.CAPABILITIES:
        for build in builds.builds(capability):
            if capability == 90 or build.name in ELSEWHERE:
                yield build.name, capability


def problems_of(facts):
    (build,) = [b for b in builds.builds(facts.capability) if b.name == facts.name]
    return ahead.gate(build, facts)


@pytest.mark.slow
def test_every_kernel_passes_the_gate():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        compiled = list(pool.map(builds.facts_of, *zip(*wanted(), strict=True), timeout=300))
    assert len(compiled) == len(list(wanted()))
    assert not [problem for facts in compiled for problem in problems_of(facts)]


def test_the_committed_table_passes_the_gate():
    names = {(b.name, c) for c in builds.CAPABILITIES for b in builds.builds(c)}
    rows = json.loads((RESULTS / "kernel_code.json").read_text())["kernels"]
    assert {(row["name"], row["capability"]) for row in rows} == names
    for row in rows:
        assert not problems_of(ahead.Facts(**row))


@triton.jit
def spin_in_assembly(flag_ptr, expect):
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 %seen; .reg .pred %early;
            SPIN:
            ld.acquire.sys.global.u32 %seen, [$1];
            setp.lt.u32 %early, %seen, $2;
            @%early bra SPIN;
            mov.u32 $0, %seen;
        }
        """,
        "=r,l,r",
        [flag_ptr.to(tl.uint64, bitcast=True), expect],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def flat_kernel(
    a_ptr, b_ptr, c_ptr, peers_ptr, state_ptr, M, N, K, epoch,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Planted: one loop over tiles and K, with the wait inside, as fast kernels are often
    written.
    """
    wide = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    program = tl.program_id(0)
    mine = (tl.cdiv(M, BM) * wide - program + PROGRAMS - 1) // PROGRAMS
    flags = device.flags_of(peers_ptr, 0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    step = -1
    tile = program - PROGRAMS
    for _ in range(steps * mine):
        step = tl.where(step == steps - 1, 0, step + 1)
        tile = tl.where(step == 0, tile + PROGRAMS, tile)
        row = tile // wide
        col = tile % wide
        if step == 0:
            if ASSEMBLY:
                spin_in_assembly(flags + row, epoch)
            else:
                device.flag_wait(flags + row, epoch, 1, 0, row, state_ptr, device.REAL)
        ra = row * BM + tl.arange(0, BM)
        rb = col * BN + tl.arange(0, BN)
        rk = step * BK + tl.arange(0, BK)
        a = tl.load(a_ptr + ra[:, None] * K + rk[None, :])
        b = tl.load(b_ptr + rb[None, :] * K + rk[:, None])
        acc = tl.dot(a, b, acc)
        if step == steps - 1:
            tl.store(c_ptr + ra[:, None] * N + rb[None, :], acc.to(tl.bfloat16))
            acc = tl.zeros((BM, BN), dtype=tl.float32)


@triton.jit
def early_sum_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, half,
    EARLY: tl.constexpr, SYNCHRONISED: tl.constexpr, STORED_FIRST: tl.constexpr,
):  # fmt: skip
    """Planted: a sum over ranks that reads a peer's data before its wait, or signals too early."""
    at = tl.arange(0, 2048)
    mine = device.data_of(peers_ptr, 0, half, tl.bfloat16)
    theirs = device.data_of(peers_ptr, 1, half, tl.bfloat16)
    if STORED_FIRST:
        tl.store(mine + at, tl.load(x_ptr + at))
    flags = device.flags_of(peers_ptr, 1)
    if SYNCHRONISED:
        device.signal(flags, 1)
    else:
        tl.atomic_xchg(flags, 1, sem="release", scope="sys")
    if not STORED_FIRST:
        tl.store(mine + at, tl.load(x_ptr + at))
    if EARLY:
        total = tl.load(theirs + at)
    device.flag_wait(device.flags_of(peers_ptr, 0), 1, 1, 1, 0, state_ptr, device.REAL)
    if not EARLY:
        total = tl.load(theirs + at)
    tl.store(out_ptr + at, total + tl.load(mine + at))


@triton.jit
def early_tile_kernel(
    rows_desc, b_desc, c_desc, peers_ptr, state_ptr, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Planted: a tile by descriptors whose first rows are fetched before its wait."""
    flags = device.flags_of(peers_ptr, 0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if EARLY:
        acc = tl.dot(rows_desc.load([0, 0]), b_desc.load([0, 0]).T, acc)
    device.flag_wait(flags, 1, 1, 0, 0, state_ptr, device.REAL)
    for k in range(tl.cdiv(K, BK)):
        acc = tl.dot(rows_desc.load([0, k * BK]), b_desc.load([0, k * BK]).T, acc)
    c_desc.store([0, 0], acc.to(tl.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_tile_by_descriptors_before_its_wait_fails_the_gate(early):
    build = ahead.Build(
        "tile",
        early_tile_kernel,
        {
            "rows_desc": "tensordesc<bf16[128, 64]>",
            "b_desc": "tensordesc<bf16[128, 64]>",
            "c_desc": "tensordesc<bf16[128, 128]>",
            "peers_ptr": "*i64",
            "state_ptr": "*i32",
            "K": "i32",
        },
        {"BM": 128, "BN": 128, "BK": 64, "EARLY": early},
        ("K",),
        warps=8,
        tensor_cores=True,
        wide_loads=False,
    )
    found = ahead.gate(build, ahead.compile_build(build, 90)[0])
    assert ["before the first wait" in text for text in found] == [True] * early, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("early", "synchronised", "stored_first", "problem"),
    [
        (False, True, True, ""),
        (True, True, True, "a peer's data is read before the first wait"),
        (False, False, True, "a flag is set with no barrier"),
        (False, True, False, "stored for a peer after the last signal"),
    ],
)
def test_a_sum_in_the_wrong_order_fails_the_gate(early, synchronised, stored_first, problem):
    build = ahead.Build(
        "sum",
        early_sum_kernel,
        {
            "x_ptr": "*bf16",
            "out_ptr": "*bf16",
            "peers_ptr": "*i64",
            "state_ptr": "*i32",
            "half": "i64",
        },
        {"EARLY": early, "SYNCHRONISED": synchronised, "STORED_FIRST": stored_first},
        ("x_ptr", "out_ptr", "half"),
        warps=8,
    )
    found = ahead.gate(build, ahead.compile_build(build, 90)[0])
    assert [problem in text for text in found] == [True] * bool(problem), found


def test_early_read_in_machine_code_is_seen_where_ttgir_is_right():
    ttgir = """
    %p = tt.int_to_ptr %base : i64 -> !tt.ptr<bf16>
    %seen = tt.atomic_rmw add, acquire, sys, %flag, %zero, %true
    %q = tt.addptr %p, %at : tensor<2048x!tt.ptr<bf16>>, tensor<2048xi32>
    %x = tt.load %q : tensor<2048x!tt.ptr<bf16>>"""
    load, store, wait = "LDG.E.128 R4, [R2]", "STG.E.128 [R8], R4", "LD.E.STRONG.SYS R0, [R2]"
    right = [load, store, wait, load, store]
    assert not hoisting.hoisted_load(ttgir, "\n".join(right))
    for wrong, said in (
        ([load, store, load, wait, load], "2 loads and 1 stores before the first"),
        ([load, store, wait, store], "reads nothing after the last"),
        ([load, store], "no acquiring read"),
    ):
        assert said in hoisting.hoisted_load(ttgir, "\n".join(wrong))
    assert "does not know" in hoisting.hoisted_load(ttgir.replace("bf16", "i8"), "\n".join(right))
    again = ttgir + "\n    %seen2 = tt.atomic_rmw add, acquire, sys, %flag, %zero, %true"
    assert "after the last wait" in hoisting.hoisted_load(again, "\n".join(right))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "assembly", "problem"),
    [
        (80, True, "loaded before the first wait"),
        (90, True, "loaded before the first wait"),
        (100, True, "loaded before the first wait"),
        (90, False, "not pipelined"),
    ],
)
def test_a_wait_in_a_flattened_loop_fails_the_gate(capability, assembly, problem):
    pointers, sizes = ("a_ptr", "b_ptr", "c_ptr"), ("M", "N", "K")
    build = ahead.Build(
        "flat",
        flat_kernel,
        {
            **dict.fromkeys(pointers, "*bf16"),
            "peers_ptr": "*i64",
            "state_ptr": "*i32",
            **dict.fromkeys((*sizes, "epoch"), "i32"),
        },
        {"BM": 128, "BN": 128, "BK": 64, "PROGRAMS": 132, "ASSEMBLY": assembly},
        (*pointers, *sizes),
        warps=8,
        tensor_cores=True,
    )
    facts, _ = ahead.compile_build(build, capability)
    assert any(problem in found for found in ahead.gate(build, facts)), facts


def test_the_gate_names_each_fault():
    build = ahead.Build("x", None, {}, {}, (), warps=4, tensor_cores=True)
    good = ahead.Facts("x", 80, 128, 0, 1 << 15, 4, 4, 0, 2, "", "")
    assert not ahead.gate(build, good)

    faults = {
        "spill_bytes": (8, "8 bytes a thread are spilled"),
        "registers": (300, "300 registers of 255"),
        "shared_bytes": (200 << 10, "204800 bytes of shared memory of 166912"),
        "tensor_core_instructions": (0, "no tensor-core instruction"),
        "narrow_loads": (3, "3 narrow loads"),
        "async_copies": (0, "not pipelined"),
        "wide_loads": (0, "0 of 128 bits"),
        "hoisted": ("a tile is loaded before its wait", "before its wait"),
        "early_signal": ("a flag is set with no barrier", "no barrier"),
    }
    for field, (value, message) in faults.items():
        (problem,) = ahead.gate(build, dataclasses.replace(good, **{field: value}))
        assert message in problem


def test_tiles_follow_the_device():

    assert tiles.tiles_for(torch.bfloat16, 1024, 80).n == 128
    assert tiles.tiles_for(torch.bfloat16, 1024, 90).n == 256
    assert tiles.tiles_for(torch.bfloat16, 32, 90).m == 64
    assert tiles.tiles_for(torch.float32, 1024, 90).k == 32
