"""What else a user asks of torch.compile: sizes that vary, breaks, regions, stances, threads, classes of one's own."""

from __future__ import annotations

import dataclasses
import threading

import torch
from comparison.feature import Given, Pairs, draw, feature, mlp, trained
from torch._dynamo.testing import CompileCounterWithBackend


@feature()
def sizes_that_vary(given: Given) -> Pairs:
    call = given.compiled(lambda x: x.sin().sum(0) * x.shape[0], dynamic=True)
    for rows in (3, 5, 8):
        yield call(draw(rows, 4)), draw(rows, 4).sin().sum(0) * rows


@feature()
def sizes_that_vary_trained(given: Given) -> Pairs:
    call = given.compiled(lambda x, w: (x @ w).relu())
    for rows in (3, 5, 8):
        yield (
            trained(call, (rows, 4), (4, 2)),
            trained(lambda x, w: (x @ w).relu(), (rows, 4), (4, 2)),
        )


@feature()
def sizes_that_are_marked(given: Given) -> Pairs:
    x = draw(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    call = given.compiled(lambda x: x.view(-1, 2).sum(1))
    yield call(x), draw(6, 4).view(-1, 2).sum(1)
    y = draw(7, 4)
    torch._dynamo.decorators.mark_unbacked(y, 0)
    yield given.compiled(lambda x: x * 2 + 1)(y), draw(7, 4) * 2 + 1


@feature()
def sizes_of_values(given: Given) -> Pairs:
    def run(x):
        n = int(x.sum())
        torch._check(n >= 0)
        return torch.ones(n).sum() + x.nonzero().shape[0]

    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        yield given.compiled(run)(torch.tensor([1, 0, 3])), run(torch.tensor([1, 0, 3]))


@feature()
def breaks(given: Given) -> Pairs:
    def run(x):
        y = x.sin()
        torch._dynamo.graph_break()
        if float(y.detach().sum()) > 1e9:
            return y
        return [y.cos() for _ in range(2)][1]

    yield trained(given.compiled(run, fullgraph=False), (4,)), trained(run, (4,))


@feature()
def loops_with_breaks(given: Given) -> Pairs:
    def run(x):
        for _ in range(3):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    yield trained(given.compiled(run, fullgraph=False), (4,)), trained(run, (4,))


@feature("aot_eager")
def graphs_of_a_loop_with_breaks(given: Given) -> Pairs:
    counter = CompileCounterWithBackend("aot_eager")

    def run(x):
        x = x * 1
        for at in range(3):
            x.add_(at)
            torch._dynamo.graph_break()
        return x

    yield torch.compile(run, backend=counter)(draw(4)), draw(4) + 3
    yield torch.tensor([counter.frame_count]), None


@feature("aot_eager")
def hooks_that_ask(given: Given) -> Pairs:
    def run(x):
        y = x.sin()
        y.register_hook(lambda g: g * 2 if g.ndim == 1 else g)
        return y * 2

    yield trained(given.compiled(run), (4,)), trained(run, (4,))


@feature()
def regions(given: Given) -> Pairs:
    @torch.compiler.nested_compile_region
    def layer(x, w):
        return (x @ w).relu()

    def run(x, w):
        for _ in range(3):
            x = layer(x, w)
        return x

    yield trained(given.compiled(run), (4, 4), (4, 4)), trained(run, (4, 4), (4, 4))


@feature()
def stances(given: Given) -> Pairs:
    call = given.compiled(lambda x: x.sin())
    with torch.compiler.set_stance("force_eager"):
        yield call(draw(4)), draw(4).sin()
    with torch.compiler.set_stance("eager_on_recompile"):
        yield call(draw(5)), draw(5).sin()
    yield call(draw(4)), draw(4).sin()


@feature("aot_eager", "lowered")
def threads(given: Given) -> Pairs:
    found = [None] * 2

    def work(at):
        found[at] = given.compiled(lambda x: x.sin() + at)(draw(4))

    workers = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for worker in workers:
        worker.start()
        worker.join()
    yield found, [draw(4).sin(), draw(4).sin() + 1]


@feature()
def modes_by_name(given: Given) -> Pairs:
    if given.backend == "aot_eager":
        yield given.compiled(lambda x: x.sin())(draw(4)), draw(4).sin()
        return
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        yield given.compiled(lambda x: x @ x, mode=mode)(draw(4, 4)), draw(4, 4) @ draw(4, 4)


@feature()
def classes(given: Given) -> Pairs:
    @dataclasses.dataclass
    class Pair:
        a: torch.Tensor
        b: float = 2.0

    def run(x):
        pair = Pair(x.sin())
        try:
            raise ValueError("mine")
        except ValueError as error:
            scale = len(str(error))
        return pair.a * pair.b * scale, {"k": pair.a}["k"]

    yield trained(given.compiled(run), (4,)), trained(run, (4,))


@feature()
def generators(given: Given) -> Pairs:
    def run(x):
        def parts():
            for row in x:
                yield row.sin()

        return torch.stack([*parts()]) + sum(i for i in range(3))

    yield trained(given.compiled(run), (3, 4)), trained(run, (3, 4))


@feature()
def global_state(given: Given) -> Pairs:
    def run(x):
        before = torch.is_grad_enabled()
        with torch.set_grad_enabled(False):
            inner = torch.is_grad_enabled()
        return x + float(before) + 2 * float(inner)

    yield given.compiled(run)(draw(4)), draw(4) + 1


@feature()
def strings_and_prints(given: Given) -> Pairs:
    def run(x):
        print("in", x.shape)
        torch._logging.warning_once(None, "x") if False else None
        return x.sin()

    yield trained(given.compiled(run, fullgraph=False), (4,)), trained(run, (4,))


@feature("eager")
def explained(given: Given) -> Pairs:
    found = torch._dynamo.explain(lambda x: x.sin())(draw(4))
    yield [found.graph_count, found.graph_break_count], [1, 0]


@feature()
def quantities_that_change(given: Given) -> Pairs:
    call = given.compiled(lambda x, k: x * k)
    for k in (2, 3, 4.5, 5.5):
        yield call(draw(4), k), draw(4) * k


@feature()
def compiled_inside_compiled(given: Given) -> Pairs:
    inner = given.compiled(lambda x: x.sin())
    yield (
        trained(given.compiled(lambda x: inner(x) * 2), (4,)),
        trained(lambda x: x.sin() * 2, (4,)),
    )


@feature()
def backend_of_a_user(given: Given) -> Pairs:
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
def custom_passes_of_a_user(given: Given) -> Pairs:
    seen = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: seen.append(1)):
        yield (
            trained(given.compiled(lambda x: x.sin() + 1), (4,)),
            trained(lambda x: x.sin() + 1, (4,)),
        )
    yield bool(seen) or given.backend == "aot_eager", True


@feature()
def modules_in_lists(given: Given) -> Pairs:
    modules = torch.nn.ModuleDict({"a": mlp(), "b": mlp(1)})

    def run(x):
        return sum(m(x) for m in modules.values())

    yield trained(given.compiled(run), (2, 8)), trained(run, (2, 8))
