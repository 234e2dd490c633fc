"""Fused kernels on one GPU: eight virtual ranks in one launch, CUDA graphs, and two processes on
one device.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLD = 8
BF16 = torch.bfloat16
# Looks at a flag: some ten seconds, so that a kernel that waits in vain is a failed test and not a
# hanging one.
SPIN_LIMIT = 20_000_000


@pytest.fixture
def space():
    from inductor_passes.fused.kernels.tiles import multiprocessors
    from inductor_passes.fused.kernels.workspace import virtual_workspace

    def make(family, data_bytes=1 << 24, **more):
        more.setdefault("spin_limit", SPIN_LIMIT)
        programs = multiprocessors(torch.device("cuda")) // WORLD
        return virtual_workspace(family, WORLD, data_bytes, "cuda", programs=programs, **more)

    return make


def close(got, wanted, tolerance=2e-2):
    assert not torch.isnan(got).any()
    scale = wanted.float().abs().max().item()
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float8_e4m3fn])
def test_all_reduce_add_norm(space, layer, two_shot, out_dtype):
    from inductor_passes.fused.kernels.all_reduce_add_norm import Norm, launch_all_reduce_add_norm

    if out_dtype != BF16 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs capability 8.9")
    rows, d = 65, 1000
    x = torch.randn(WORLD * rows, d, device="cuda", dtype=BF16)
    residual = torch.randn(rows, d, device="cuda", dtype=BF16)
    weight, shift = torch.randn(2, d, device="cuda", dtype=BF16)
    shift = shift if layer else None
    terms = Norm(residual, None, weight, shift, out_dtype=out_dtype, layer=layer)
    area = space("all_reduce_add_norm")
    stacked = terms._replace(residual=residual.repeat(WORLD, 1))
    outs = launch_all_reduce_add_norm(x, stacked, area, two_shot=two_shot)
    torch.cuda.synchronize()
    area.raise_if_failed()
    summed = x.view(WORLD, rows, d).float().sum(0).to(BF16)
    wanted = terms._replace(out_dtype=torch.float32).of(summed)
    y = outs[0][:rows].float()
    y = y * outs[4][:rows] if outs[4].numel() else y
    close(y, wanted[0], 2e-2 if out_dtype == BF16 else 0.07)


def ways():
    """Tiles by threads' copies, and by descriptors where the device has them."""
    from inductor_passes.fused.kernels.tiles import Tiles, capability_of, tiles_for

    capability = capability_of(torch.device("cuda"))
    yield lambda rows: {"tiles": tiles_for(BF16, rows, capability)}
    if capability >= 90:
        for m, n, warps in ((64, 128, 4), (128, 256, 8)):
            tiles = Tiles(m, n, 64, warps, 4)
            yield lambda rows, tiles=tiles: {"tiles": tiles, "descriptors": True}


@pytest.mark.parametrize("rows_lie", [False, True])
def test_all_gather_matmul(space, rows_lie):
    from inductor_passes.fused.kernels import all_gather_matmul as gather

    area = space("all_gather_matmul")
    for way, (rows, k, n) in itertools.product(ways(), ((256, 512, 512), (100, 504, 296))):
        a = torch.randn(WORLD * rows, k, device="cuda", dtype=BF16)
        weights = [
            torch.randn(n + 8 * i, k, device="cuda", dtype=BF16).t() / k**0.5 for i in range(3)
        ]
        if rows_lie:
            weights = [weight.contiguous() for weight in weights]
        *outs, whole = gather.launch_all_gather_matmul(
            a,
            weights,
            [],
            area,
            gather=True,
            copiers=2,
            **way(rows),
        )
        torch.cuda.synchronize()
        area.raise_if_failed()
        for out, weight in zip(outs, weights, strict=True):
            close(out, (a.float() @ weight.float()).repeat(WORLD, 1))
        assert torch.equal(whole, a.repeat(WORLD, 1))


def test_matmul_reduce_scatter(space):
    from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter

    area = space("matmul_reduce_scatter")
    for way, (rows, k, n) in itertools.product(ways(), ((128, 512, 512), (50, 200, 296))):
        a = torch.randn(WORLD, WORLD * rows, k, device="cuda", dtype=BF16)
        b = torch.randn(WORLD, k, n, device="cuda", dtype=BF16) / k**0.5
        out = scatter.launch_matmul_reduce_scatter(
            a.view(-1, k), b.view(-1, n), area, average=False, **way(rows)
        )
        torch.cuda.synchronize()
        area.raise_if_failed()
        close(out, torch.bmm(a.float(), b.float()).sum(0))


def replayed_sum(space):
    from inductor_passes.fused.kernels.all_reduce_add_norm import Norm, launch_all_reduce_add_norm

    area = space("all_reduce_add_norm")
    x = torch.randn(WORLD * 10, 1000, device="cuda", dtype=BF16)
    norm = Norm(out_dtype=BF16)
    return area, lambda: launch_all_reduce_add_norm(x, norm, area, two_shot=True)[0]


def replayed_gather(space):
    from inductor_passes.fused.kernels.all_gather_matmul import launch_all_gather_matmul

    area = space("all_gather_matmul")
    a = torch.randn(WORLD * 128, 512, device="cuda", dtype=BF16)
    weight = torch.randn(512, 256, device="cuda", dtype=BF16)
    *_, way = ways()
    return area, lambda: launch_all_gather_matmul(a, [weight], [], area, copiers=2, **way(128))[0]


def replayed_scatter(space):
    from inductor_passes.fused.kernels.matmul_reduce_scatter import launch_matmul_reduce_scatter

    area = space("matmul_reduce_scatter")
    a = torch.randn(WORLD * WORLD * 128, 512, device="cuda", dtype=BF16)
    b = torch.randn(WORLD * 512, 256, device="cuda", dtype=BF16)
    *_, way = ways()
    return area, lambda: launch_matmul_reduce_scatter(a, b, area, average=False, **way(128))


@pytest.mark.parametrize("make", [replayed_sum, replayed_gather, replayed_scatter])
def test_a_graph_replays(space, make):
    area, call = make(space)
    first = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for replay in range(1000):
        if replay % 100 == 0:
            out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    area.raise_if_failed()
    assert torch.equal(out, first)


def test_a_flag_that_never_comes_ends_in_an_error(space):
    from inductor_passes.errors import KernelError
    from inductor_passes.fused.kernels.all_reduce_add_norm import Norm, launch_all_reduce_add_norm

    area = space("all_reduce_add_norm", spin_limit=10000)
    area.state[3, 16:528] = 7  # rank 3 waits for calls that its peers are not in
    x = torch.randn(WORLD, 100, device="cuda")
    out, *_ = launch_all_reduce_add_norm(x, Norm(), area, two_shot=False)
    torch.cuda.synchronize()
    assert torch.isnan(out[3]).all()
    with pytest.raises(KernelError, match="gave up on chunk"):
        area.raise_if_failed()


@pytest.mark.parametrize("first", ["eager", "graph"])
def test_two_processes_on_one_device(first):
    """Symmetric memory as it is used between devices; one device, so nothing is said of speed.

    It is made by an eager call, or while Inductor warms up for a CUDA graph.
    """
    env = {
        **os.environ,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29731",
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "INDUCTOR_PASSES_KERNEL_WAIT_SECONDS": "10",
    }
    worker = Path(__file__).parent / "symmetric_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, first],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
        assert max(json.loads(out).values()) < 5e-2, out
