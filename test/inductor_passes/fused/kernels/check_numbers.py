"""Every kernel in Triton's interpreter against its eager reference; ``test_interpreted.py`` runs
this.

By hand: TRITON_INTERPRET=1 pytest test/inductor_passes/fused/kernels/check_numbers.py
"""

import pytest
import torch
from interpreted import Schedule, workspace

from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import all_reduce_add_norm as norm
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels.all_reduce_add_norm import Norm
from inductor_passes.fused.kernels.tiles import Tiles

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# One rounding to the result's type; the interpreter truncates to bfloat16 where a device rounds.
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}
TILES = Tiles(16, 16, 16, warps=4, stages=1)


def close(got, wanted, dtype):
    assert not torch.isnan(got).any()
    scale = wanted.float().abs().max().item()
    torch.testing.assert_close(
        got.float(), wanted.float(), atol=TOLERANCE[dtype] * scale, rtol=0, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_totals(world, dtype):
    torch.manual_seed(world)
    x = torch.randn(world, 7, 43).to(dtype)
    outs = []
    for two_shot in (False, True):
        space = workspace("all_reduce_add_norm", world)
        with Schedule(seed=world):
            _, total, *_ = norm.launch_all_reduce_add_norm(
                x.view(-1, 43), Norm(out_dtype=dtype), space, two_shot=two_shot
            )
        outs.append(total.view(x.shape))
        space.raise_if_failed()
    close(outs[0][0], x.float().sum(0), dtype)
    for rank in range(world):  # the same bits on every rank, and from both algorithms
        assert torch.equal(outs[0][rank], outs[0][0])
        assert torch.equal(outs[1][rank], outs[0][0])


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    ("world", "dtype", "full"), [(2, F32, True), (3, BF16, True), (2, F16, False), (8, F32, True)]
)
def test_all_reduce_add_norm(world, dtype, full, layer, two_shot):
    torch.manual_seed(world)
    rows, d = 5, 50
    x = torch.randn(world * rows, d).to(dtype)
    residual, bias, weight, shift = (
        torch.randn(*shape).to(dtype) if full else None for shape in ((rows, d), (d,), (d,), (d,))
    )
    shift = shift if layer else None
    space = workspace("all_reduce_add_norm", world)
    terms = Norm(residual, bias, weight, shift, 1e-5, dtype, layer)
    stacked = None if residual is None else residual.repeat(world, 1)
    with Schedule(seed=1):
        outs = norm.launch_all_reduce_add_norm(
            x, terms._replace(residual=stacked), space, two_shot=two_shot
        )
    space.raise_if_failed()
    wanted = terms.of(x.view(world, rows, d).float().sum(0))
    for got, want in zip(outs, wanted, strict=True):
        assert got.numel() == want.numel() * world
        if got.numel():
            close(got[:rows], want, dtype)
            for rank in range(1, world):
                assert torch.equal(got[:rows], got[rank * rows : (rank + 1) * rows])


@pytest.mark.parametrize(("layer", "two_shot"), [(False, False), (True, True)])
def test_quantised_norm(layer, two_shot):
    torch.manual_seed(0)
    x, weight = torch.randn(2 * 3, 64), torch.randn(64)
    space = workspace("all_reduce_add_norm", 2)
    terms = Norm(weight=weight, shift=torch.randn(64) if layer else None, layer=layer)
    with Schedule():
        y, _, _, _, scale = norm.launch_all_reduce_add_norm(
            x, terms._replace(out_dtype=torch.float8_e4m3fn), space, two_shot=two_shot
        )
    wanted = terms.of(x[:3] + x[3:])
    assert y.dtype == torch.float8_e4m3fn
    # Three bits of mantissa: steps of one eighth. The interpreter halves a number whose mantissa
    # rounds up to the next power of two, one in a few dozen; a device does not.
    near = torch.isclose(y[:3].float() * scale[:3], wanted[0], rtol=0.13, atol=0.02)
    assert near.float().mean() > 0.95


@pytest.mark.parametrize(
    ("world", "dtype", "rows", "k", "widths", "transposed", "activation"),
    [
        (2, F32, 16, 32, (32,), False, "none"),
        (2, F16, 40, 24, (24, 16), True, "silu"),
        (3, BF16, 20, 16, (16, 17, 8), False, "relu"),
        (4, F32, 5, 40, (20,), True, "gelu"),
        (8, F32, 3, 16, (16,), False, "none"),
    ],
)
@pytest.mark.parametrize("descriptors", [False, True])
def test_all_gather_matmul(world, dtype, rows, k, widths, transposed, activation, descriptors):
    torch.manual_seed(rows)
    if descriptors:  # strides in units of 16 bytes
        widths = [-(-width // 8) * 8 for width in widths]
    a = torch.randn(world * rows, k).to(dtype)
    weights = [(torch.randn(k, n) / k**0.5).to(dtype) for n in widths]
    if transposed:
        weights = [w.t().contiguous().t() for w in weights]
    biases = [torch.randn(n).to(dtype) for n in widths] if activation != "none" else []
    space = workspace("all_gather_matmul", world, programs=3)
    with Schedule(seed=rows):
        *outs, gathered = gather.launch_all_gather_matmul(
            a,
            weights,
            biases,
            space,
            activation=activation,
            gather=True,
            tiles=TILES,
            copiers=1 + (world == 2),
            copy_block=64,
            descriptors=descriptors,
        )
    space.raise_if_failed()
    as_float = [[t.float() for t in ts] for ts in (weights, biases)]
    wanted = gather.products(a.float(), *as_float, activation)
    for got, want in zip(outs, wanted, strict=True):
        for rank in range(world):
            close(got[rank * world * rows :][: world * rows], want, dtype)
    assert torch.equal(gathered, a.repeat(world, 1))


@pytest.mark.parametrize(
    ("world", "dtype", "rows", "k", "n"),
    [(2, F32, 16, 16, 16), (3, F16, 20, 24, 17), (2, BF16, 5, 40, 32), (8, F32, 2, 16, 16)],
)
@pytest.mark.parametrize("descriptors", [False, True])
def test_matmul_reduce_scatter(world, dtype, rows, k, n, descriptors):
    torch.manual_seed(rows)
    if descriptors:
        n = -(-n // 8) * 8
    a = torch.randn(world, world * rows, k).to(dtype)
    b = (torch.randn(world, k, n) / k**0.5).to(dtype)
    wanted = torch.bmm(a.float(), b.float()).sum(0)
    for average in (False, True):
        space = workspace("matmul_reduce_scatter", world, programs=2)
        with Schedule(seed=rows):
            out = scatter.launch_matmul_reduce_scatter(
                a.view(-1, k),
                b.view(-1, n),
                space,
                average=average,
                tiles=TILES,
                block=64,
                descriptors=descriptors,
            )
        space.raise_if_failed()
        close(out, wanted / world if average else wanted, dtype)
