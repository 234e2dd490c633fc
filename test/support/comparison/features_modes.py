"""Modes of torch's dispatch: those of users, fake tensors, counters, inference, devices,
determinism.
"""

from __future__ import annotations

import torch
from comparison.program import draw, feature, mlp, trained, trained_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Double(TorchFunctionMode):
    """Sines are doubled."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.Tensor.sin) else out


@feature("eager")
def dispatch_mode_in_eager(given):
    with Count() as count:
        trained(lambda x: x.sin().exp(), (4,))
    wanted = "aten.sin.default aten.exp.default".split()
    yield (
        [name for name in count.seen if name in wanted][:3],
        ["aten.sin.default", "aten.exp.default", "aten.sin.default"],
    )


@feature()
def dispatch_mode_around(given):
    call = given.compiled(lambda x: x.sin().exp(), fullgraph=False)
    with Count():
        yield trained(call, (4,)), trained(lambda x: x.sin().exp(), (4,))


@feature()
def function_mode_around(given):
    call = given.compiled(lambda x: x.sin() + 1)
    with Double():
        yield call(draw(4)), draw(4).sin() + 1


@feature()
def function_mode_inside(given):
    def run(x):
        with Double():
            return x.sin() + 1

    yield given.compiled(run)(draw(4)), run(draw(4))


@feature("eager")
def flops_of_compiled(given):
    from torch.utils.flop_counter import FlopCounterMode

    module = mlp()
    call = torch.compile(module, backend="aot_eager")
    call(draw(4, 8))
    with FlopCounterMode(display=False) as counter:
        call(draw(4, 8))
    yield counter.get_total_flops(), 2 * 4 * 8 * 16 * 2


@feature("eager")
def fake_tensors(given):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = mlp()
        out = module(torch.empty(4, 8))
        out.sum().backward()
        yield [list(out.shape), list(module[0].weight.grad.shape)], [[4, 8], [16, 8]]


@feature()
def inference(given):
    module = mlp()
    call = given.compiled(module)
    with torch.inference_mode():
        yield call(draw(4, 8)), module(draw(4, 8))
    yield trained_module(module, call, draw(4, 8)), trained_module(module, module, draw(4, 8))


@feature()
def deterministic(given):
    torch.use_deterministic_algorithms(True)
    try:

        def run(x):
            return torch.zeros(3).index_add(0, torch.tensor([0, 1, 0, 2]), x).sin()

        yield trained(given.compiled(run), (4,)), trained(run, (4,))
    finally:
        torch.use_deterministic_algorithms(False)


@feature()
def profiled(given):
    def run(x):
        with torch.profiler.record_function("mine"):
            return x.sin()

    with torch.profiler.profile() as profile:
        yield trained(given.compiled(run), (4,)), trained(run, (4,))
    yield any(event.key == "mine" for event in profile.key_averages()), True


@feature()
def seeds(given):
    def run(x):
        return torch.nn.functional.dropout(x, 0.5)

    call = given.compiled(run)
    x = torch.ones(1000)
    torch.manual_seed(5)
    first = call(x)
    torch.manual_seed(5)
    yield call(x), first
    with torch.random.fork_rng():
        call(x)
    yield set(first.unique().tolist()), {0.0, 2.0}


@feature("aot_eager")
def seeds_as_in_eager(given):
    call = given.compiled(
        lambda x: torch.nn.functional.dropout(x, 0.5) + torch.randn(4) + torch.rand_like(x)
    )
    torch.manual_seed(5)
    found = call(torch.ones(4))
    torch.manual_seed(5)
    yield (
        found,
        torch.nn.functional.dropout(torch.ones(4), 0.5)
        + torch.randn(4)
        + torch.rand_like(torch.ones(4)),
    )
