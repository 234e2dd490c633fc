"""Exports: strict and not, with and without sizes that vary, of plain and of parallel modules;
ahead of time.
"""

from __future__ import annotations

import contextlib
import io

import torch
from comparison.program import draw, feature, mlp
from torch import nn


class Counting(nn.Module):
    """Writes a buffer, branches, and has a parameter that two names share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x, extra=None):
        self.calls.add_(1)
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.b(self.a(x)),))
        return y if extra is None else y + extra["bias"]


@contextlib.contextmanager
def parallel(rank=0):
    """Two linear layers, tensor parallel by torch's own plan, on a fake group of two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        yield parallelize_module(mlp(), init_device_mesh("cpu", (2,)), plan)
    finally:
        dist.destroy_process_group()


def _exports(strict):
    module, x = mlp(), draw(4, 8)
    yield torch.export.export(module, (x,), strict=strict).module()(x), module(x)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (x,), dynamic_shapes={"input": {0: rows}}, strict=strict)
    yield program.module()(draw(7, 8)), module(draw(7, 8))
    y = program.run_decompositions().module()(draw(7, 8))
    yield y, module(draw(7, 8))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    yield torch.export.load(file).module()(x), module(x)


@feature("eager")
def export_strict(given):
    yield from _exports(True)


@feature("eager")
def export_not_strict(given):
    yield from _exports(False)


def _counted(strict):
    module, x = Counting(), draw(2, 4)
    extra = {"bias": draw(4)}
    exported = torch.export.export(module, (x,), {"extra": extra}, strict=strict).module()
    yield exported(x, extra=extra), module(x, extra)
    yield exported.calls, module.calls


@feature("eager")
def export_strict_with_buffers(given):
    yield from _counted(True)


@feature("eager")
def export_not_strict_with_buffers(given):
    yield from _counted(False)


def _parallel(strict):
    with parallel() as module:
        x = draw(4, 8)
        program = torch.export.export(module, (x,), strict=strict)
        yield program.module()(x), module(x)


@feature("eager")
def export_strict_of_parallel(given):
    yield from _parallel(True)


@feature("eager")
def export_not_strict_of_parallel(given):
    yield from _parallel(False)


@feature("eager")
def export_strict_of_sequence_parallel(given):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        module = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.0))
        plan = {"0": SequenceParallel(), "1": SequenceParallel(use_local_output=True)}
        parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
        x = draw(2, 4, 8)
        yield torch.export.export(module, (x,), strict=True).module()(x), module(x)
    finally:
        dist.destroy_process_group()


@feature("eager")
def export_strict_with_hooks(given):
    """Hooks that close over a value, an object and a function, as those of parallel styles do."""

    class Scale:
        by = 2.0

    def build():
        module, scale, kinds = mlp(), Scale(), (torch.sin, torch.cos)
        module[0].register_forward_pre_hook(lambda m, a: (a[0] * scale.by,))
        module[0].register_forward_hook(lambda m, a, o: kinds[0](o))
        module.register_forward_hook(lambda m, a, k, o: kinds[1](o), with_kwargs=True)
        return module

    module, x = build(), draw(4, 8)
    for strict in (True, False):
        yield torch.export.export(module, (x,), strict=strict).module()(x), module(x)


@feature("eager")
def export_with_grad(given):
    module, x = mlp(), draw(4, 8)
    exported = torch.export.export(module, (x,), strict=True).module()
    exported(x).sum().backward()
    module(x).sum().backward()
    yield [p.grad for p in exported.parameters()], [p.grad for p in module.parameters()]


@feature("eager")
def export_draft(given):
    module, x = mlp(), draw(4, 8)
    yield torch.export.draft_export(module, (x,)).module()(x), module(x)


@feature("code")
def ahead_of_time(given):
    import tempfile

    module, x = mlp().eval(), draw(4, 8)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(module, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/m.pt2")
        yield torch._inductor.aoti_load_package(path)(x), module(x)


@feature("eager")
def traced_to_graphs(given):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = draw(4, 8)
    for mode in ("real", "fake", "symbolic"):
        yield make_fx(lambda a: (a @ a.t()).relu(), tracing_mode=mode)(x)(x), (x @ x.t()).relu()


@feature("eager")
def traced_jointly(given):
    from functorch.compile import aot_function, default_partition, nop

    x = draw(4, grad=True)
    call = aot_function(
        lambda a: a.sin().exp(), fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition
    )
    yield torch.autograd.grad(call(x).sum(), x), torch.autograd.grad(x.sin().exp().sum(), x)
