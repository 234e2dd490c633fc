"""``torch.compile(model, backend="dynamo_dist")`` on a tensor-parallel model, against eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group

pytestmark = [pytest.mark.slow, pytest.mark.main]
D = 32


class MLP(nn.Module):
    def __init__(self, wrap=None):
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.wrap = wrap

    def block(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.block(x)
        if self.wrap == "checkpoint":
            return x + checkpoint(self.block, x, use_reentrant=False)
        if self.wrap == "break":
            torch._dynamo.graph_break()
        return x + self.block(x)


@pytest.fixture(autouse=True)
def mesh():
    torch._dynamo.reset()
    with fake_group(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dynamo_dist.disable()
    torch._dynamo.reset()


def parallel_mlp(mesh, wrap=None):
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(MLP(wrap), mesh, plan)


def gradients(model, out):
    out.sum().backward()
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    model.zero_grad()
    return grads


def check(model, compiled, x, *, train=True):
    with torch.set_grad_enabled(train):
        expected, got = model(x), compiled(x)
    torch.testing.assert_close(got, expected)
    if train:
        torch.testing.assert_close(gradients(model, got), gradients(model, expected))


@pytest.mark.parametrize("wrap", [None, "checkpoint"])
def test_training_step(mesh, wrap):
    model = parallel_mlp(mesh, wrap)
    with recorder.records_of_block() as records:
        compiled = torch.compile(model, backend="dynamo_dist", fullgraph=True)
        check(model, compiled, torch.randn(8, D, requires_grad=True))
    assert dynamo_dist.is_enabled()
    assert [r.phase for r in records] == ["forward", "backward"]
    assert all(r.order_kept for r in records)
    assert [c.kind for r in records for c in r.collectives].count("all_reduce") >= 4


def test_inference_and_several_graphs(mesh):
    model = parallel_mlp(mesh, "break")
    with recorder.records_of_block() as records:
        check(model, torch.compile(model, backend="dynamo_dist"), torch.randn(8, D), train=False)
    assert [r.phase for r in records] == ["inference", "inference"]
    assert len({r.graph_id for r in records}) == 2


def test_dynamic_sizes_compile_once(mesh):
    model = parallel_mlp(mesh)
    with recorder.records_of_block() as records:
        compiled = torch.compile(model, backend="dynamo_dist", fullgraph=True, dynamic=True)
        for batch in (8, 12, 20):
            check(model, compiled, torch.randn(batch, D), train=False)
    assert len(records) == 1


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_mean_what_they_mean_in_upstream(mesh, mode):
    model = parallel_mlp(mesh)
    check(
        model,
        torch.compile(model, backend="dynamo_dist", mode=mode),
        torch.randn(8, D),
        train=False,
    )


def test_an_unknown_mode_or_option_names_the_known(mesh):
    model, x = parallel_mlp(mesh), torch.randn(8, D)
    with pytest.raises(Exception, match=r"fastest.*reduce-overhead"):
        torch.compile(model, backend="dynamo_dist", mode="fastest")(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"Unknown option 'topolgy'.*compile"):
        torch.compile(model, backend="dynamo_dist", options={"topolgy": "h100x8"})(x)


def test_exported_and_compiled_ahead_of_time(mesh):
    import torch.distributed._functional_collectives as fc

    import inductor_passes as ip

    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D // 4, D))

        def forward(self, x):
            return torch.relu(x @ fc.all_gather_tensor(self.w, 0, torch.distributed.group.WORLD))

    model, x = Gathered().eval(), torch.randn(8, D)
    with torch.no_grad(), dynamo_dist.enabled(), recorder.records_of_block() as records:
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, inductor_configs=ip.options())
        got = torch._inductor.aoti_load_package(package)(x)
        torch.testing.assert_close(got, model(x))
    assert [len(r.collectives) for r in records] == [1]
