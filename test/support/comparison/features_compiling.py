"""What else a user asks of torch.compile: sizes that vary, breaks, regions, stances, threads,
classes of one's own.
"""

from __future__ import annotations

import threading

import torch
from comparison.program import draw, feature, trained
from torch._dynamo.testing import CompileCounterWithBackend


@feature()
def sizes_that_vary_trained(given):
    call = given.compiled(lambda x, w: (x @ w).relu())
    for rows in (3, 5, 8):
        yield (
            trained(call, (rows, 4), (4, 2)),
            trained(lambda x, w: (x @ w).relu(), (rows, 4), (4, 2)),
        )


@feature()
def sizes_that_are_marked(given):
    x = draw(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    call = given.compiled(lambda x: x.view(-1, 2).sum(1))
    yield call(x), draw(6, 4).view(-1, 2).sum(1)
    y = draw(7, 4)
    torch._dynamo.decorators.mark_unbacked(y, 0)
    yield given.compiled(lambda x: x * 2 + 1)(y), draw(7, 4) * 2 + 1


@feature()
def sizes_of_values(given):
    def run(x):
        n = int(x.sum())
        torch._check(n >= 0)
        return torch.ones(n).sum() + x.nonzero().shape[0]

    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        yield given.compiled(run)(torch.tensor([1, 0, 3])), run(torch.tensor([1, 0, 3]))


@feature()
def breaks(given):
    def run(x):
        y = x.sin()
        torch._dynamo.graph_break()
        if float(y.detach().sum()) > 1e9:
            return y
        return [y.cos() for _ in range(2)][1]

    yield trained(given.compiled(run, fullgraph=False), (4,)), trained(run, (4,))


@feature("aot_eager")
def graphs_of_a_loop_with_breaks(given):
    counter = CompileCounterWithBackend("aot_eager")

    def run(x):
        x = x * 1
        for at in range(3):
            x.add_(at)
            torch._dynamo.graph_break()
        return x

    yield torch.compile(run, backend=counter)(draw(4)), draw(4) + 3
    yield torch.tensor([counter.frame_count]), None


@feature()
def regions(given):
    @torch.compiler.nested_compile_region
    def layer(x, w):
        return (x @ w).relu()

    def run(x, w):
        for _ in range(3):
            x = layer(x, w)
        return x

    yield trained(given.compiled(run), (4, 4), (4, 4)), trained(run, (4, 4), (4, 4))


@feature()
def stances(given):
    call = given.compiled(lambda x: x.sin())
    with torch.compiler.set_stance("force_eager"):
        yield call(draw(4)), draw(4).sin()
    with torch.compiler.set_stance("eager_on_recompile"):
        yield call(draw(5)), draw(5).sin()
    yield call(draw(4)), draw(4).sin()


@feature("aot_eager", "lowered")
def threads(given):
    found = [None] * 2

    def work(at):
        found[at] = given.compiled(lambda x: x.sin() + at)(draw(4))

    workers = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for worker in workers:
        worker.start()
        worker.join()
    yield found, [draw(4).sin(), draw(4).sin() + 1]


@feature()
def compiled_inside_compiled(given):
    inner = given.compiled(lambda x: x.sin())
    yield (
        trained(given.compiled(lambda x: inner(x) * 2), (4,)),
        trained(lambda x: x.sin() * 2, (4,)),
    )


@feature()
def backend_of_a_user(given):
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def compiler(gm, inputs):
        seen.append(len(list(gm.graph.nodes)))
        return gm.forward

    from functorch.compile import make_boxed_func

    backend = aot_autograd(fw_compiler=lambda gm, i: make_boxed_func(compiler(gm, i)))
    yield trained(torch.compile(lambda x: x.sin(), backend=backend), (4,)), trained(torch.sin, (4,))
    yield len(seen), 2


@feature()
def custom_passes_of_a_user(given):
    seen = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: seen.append(1)):
        yield (
            trained(given.compiled(lambda x: x.sin() + 1), (4,)),
            trained(lambda x: x.sin() + 1, (4,)),
        )
    yield bool(seen) or given.backend == "aot_eager", True
