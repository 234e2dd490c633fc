"""Tiles by descriptors: what can be described, and how many tiles of a product stay whole."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

from inductor_passes.fused.kernels import device, gather_tma, tiles

A = torch.empty(128, 512, dtype=torch.bfloat16)


def weight(k=512, n=256, dtype=torch.bfloat16, transposed=True):
    return torch.empty(n, k, dtype=dtype).t() if transposed else torch.empty(k, n, dtype=dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_described_along_the_stride_that_is_1(transposed):
    w = weight(transposed=transposed)
    assert tiles.can_describe(90, A, [w])
    found = tiles.describe_weight(w, tiles.tma_tiles(1024))
    assert found.shape == ([1, 256, 512] if transposed else [1, 512, 256])
    assert found.block_shape == ([1, 256, 64] if transposed else [1, 64, 256])
    assert tiles.rows_lie(w) is not transposed


@pytest.mark.parametrize(
    ("capability", "a", "w"),
    [
        (80, A, weight()),  # an A100 has no such copies
        (90, A.float(), weight(dtype=torch.float32)),
        (90, A[:, :500].contiguous(), weight(500)),  # rows of 1000 bytes
        (90, A, weight(n=250, transposed=False)),
        (90, A, weight(1024)[::2]),  # no stride is 1
    ],
)
def test_what_no_descriptor_can_name(capability, a, w):
    assert not tiles.can_describe(capability, a, [w])


@pytest.mark.parametrize("transposed", [False, True])
def test_where_a_tensor_begins_decides_no_kernel_but_a_copy(transposed):
    shape = (512, 256)
    off = torch.randn(512 * 256 + 4).bfloat16()[4:]  # 8 bytes off
    w = off.view(256, 512).t() if transposed else off.view(shape)
    assert tiles.can_describe(90, A, [w])
    moved = tiles.aligned(w)
    assert torch.equal(moved, w)
    assert (moved.stride(), moved.data_ptr() % 16) == (w.stride(), 0)
    assert tiles.aligned(moved) is moved


def test_float32_is_multiplied_as_this_process_asks():
    real, tf32 = device.REAL.value, device.TF32.value
    assert tiles.mode_of(real, torch.float32) == real
    torch.set_float32_matmul_precision("high")
    try:
        assert tiles.mode_of(real, torch.float32) == tf32
        assert tiles.mode_of(real, torch.bfloat16) == real
        assert tiles.mode_of(device.CHECKING.value, torch.float32) == device.CHECKING.value
    finally:
        torch.set_float32_matmul_precision("highest")


def units(rows, widths, world=8, programs=132):
    """Whole tiles, and the waves that all tiles take."""
    size = tiles.tma_tiles(rows)
    count = world * -(-rows // size.m) * sum(-(-width // size.n) for width in widths)
    return tiles.whole_tiles(rows, widths, world, programs, size), count


def test_a_last_wave_that_halves_can_share_is_halved():
    assert units(1024, [7168]) == (
        1792,
        1792,
    )  # 76 tiles in the last wave: 152 halves would take two
    assert units(1024, [1280]) == (264, 320)
    assert units(1024, [768]) == (132, 192)
    assert units(128, [512]) == (0, 16)  # less than a wave: all in halves
    assert units(1024, [132 * 256]) == (64 * 132, 64 * 132)  # no wave is short


def test_more_programs_push_where_the_link_is_longer():
    assert gather_tma.copiers_for([1280]) == 2 * gather_tma.copiers_for([3584, 3584])
