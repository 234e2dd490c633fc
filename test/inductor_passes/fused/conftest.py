import copy

import pytest
import torch
from torch import fx

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.pipeline import run_pass
from inductor_passes.testing import fake_group, run_on_ranks, trace

WORLD = 8


@pytest.fixture
def cost():
    return TopologyCostModel(load_topology("h100x8"))


@pytest.fixture
def world():
    """Eight ranks in this process, on one host, as far as a fusion can tell."""
    pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")
    with fake_group(WORLD):
        yield WORLD


@pytest.fixture
def fuse(cost, world):
    """Run a fusion as where its kernel can run; ``obstacle`` says why it cannot."""

    def run(fusion, graph, obstacle="", cost=cost):
        return run_pass(fusion(cost, obstacle=lambda group, device: obstacle), graph)

    return run


@pytest.fixture
def references(world):
    """What stands for each fused operator where true numbers are wanted, by the operator's name."""
    from inductor_passes.fused.kernels import (
        all_gather_matmul,
        all_reduce_add_norm,
        matmul_reduce_scatter,
    )
    from inductor_passes.fused.kernels.all_reduce_add_norm import Norm

    def rms(x, residual, bias, weight, eps, out_dtype, group_name):
        norm = Norm(residual, bias, weight, None, eps, out_dtype)
        outs = all_reduce_add_norm.reference(x, norm, group_name)
        return [out for i, out in enumerate(outs) if i != 2]  # it has no mean

    def layer(x, *terms):
        *terms, group_name = terms
        return all_reduce_add_norm.reference(x, Norm(*terms, layer=True), group_name)

    return {
        "all_gather_matmul": all_gather_matmul.reference,
        "matmul_reduce_scatter": matmul_reduce_scatter.reference,
        "all_reduce_add_rmsnorm": rms,
        "all_reduce_add_layernorm": layer,
    }


@pytest.fixture
def same_on_all_ranks(fuse, references):
    """Fuse, put the eager reference where a kernel stands, and run both graphs on true numbers."""

    def check(fusion, fn, *shapes):
        before = trace(fn, *shapes)
        after = fx.GraphModule({}, copy.deepcopy(before)).graph
        record = fuse(fusion, after)
        assert record.counters["fused"] == 1, record.notes
        for node in after.nodes:
            if getattr(node.target, "namespace", "") == "inductor_passes":
                node.target = references[node.target._opname]
        torch.manual_seed(0)
        inputs = [[torch.randn(*shape) / 4 for _ in range(WORLD)] for shape in shapes]
        for got, wanted in zip(
            run_on_ranks(after, *inputs), run_on_ranks(before, *inputs), strict=True
        ):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

    return check
