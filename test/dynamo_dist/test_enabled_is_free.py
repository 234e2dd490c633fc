"""Programs of one device, with the plugin enabled and never used: what they return and raise is
what it is without.
"""

import copy
import io
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, forward_ad, graph
from torch.autograd.functional import hessian as functional_hessian
from torch.autograd.functional import hvp, jvp, vhp
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.func import jvp as func_jvp
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dynamo_dist


def numbers(*shape):
    size = torch.Size(shape).numel()
    return torch.linspace(-1, 1, size).view(shape) * 0.9 + 0.05


def leaf(*shape):
    return numbers(*shape).requires_grad_()


def wave(x):
    return (x.sin() * x**3).sum()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Cubed(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


class CubedForAll(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * 3 * x**2


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 2


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Flawed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * float("nan")


# Functions of one tensor: in eager mode, and compiled by each backend.
FUNCTIONS = {
    "vjp": lambda x: vjp(wave, x)[1](torch.tensor(2.0))[0],
    "vjp of two": lambda x: vjp(torch.mul, x, x + 1)[1](x)[1],
    "jvp": lambda x: func_jvp(torch.sin, (x,), (x + 1,)),
    "grad": grad(wave),
    "grad and value": grad_and_value(wave),
    "grad with aux": grad(lambda x: (wave(x), x.cos()), has_aux=True),
    "grad of grad": lambda x: grad(lambda y: grad(wave)(y).sum())(x),
    "jacrev": jacrev(torch.sin),
    "jacfwd": jacfwd(torch.sin),
    "jacfwd of jacrev": jacfwd(jacrev(wave)),
    "jacrev of jacfwd": jacrev(jacfwd(wave)),
    "hessian": hessian(wave),
    "vmap": vmap(lambda x: x.softmax(-1)),
    "vmap of vmap": vmap(vmap(torch.sin)),
    "vmap of grad": vmap(grad(wave)),
    "vmap of hessian": vmap(hessian(wave)),
    "vmap of vjp": vmap(lambda x: vjp(torch.sin, x)[1](x)[0]),
    "vmap over another dimension": vmap(torch.sin, in_dims=1, out_dims=1),
    "vmap of custom function": vmap(CubedForAll.apply),
    "grad of vmap": grad(lambda x: vmap(torch.sin)(x).sum()),
    "per-sample gradients": lambda x: vmap(
        grad(lambda w, r: (w * r).sin().sum()), in_dims=(None, 0)
    )(torch.ones(4), x),
    "autograd.grad": lambda x: torch.autograd.grad(wave(y := x.detach().requires_grad_()), y)[0],
    "views and writes": lambda x: x.clone().t().mul_(2)[1:].add_(1),
    "a layer norm": lambda x: F.layer_norm(x, (4,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "sort": lambda x: x.sort(descending=True),
    "a mask": lambda x: torch.where(x > 0, x, -x),
    "in no_grad": lambda x: torch.no_grad()(wave)(x),
    "custom function": lambda x: Cubed.apply(x),
    "custom function that writes": lambda x: Dirty.apply(x.clone()),
    "checkpoint": lambda x: checkpoint(wave, x, use_reentrant=False),
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(lambda y: y @ y.t())(x),
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "detached alias": lambda x: (lambda y: (y[:1], y[1:], y.detach()))(x.sin()),
    "a seeded draw": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5))[1],
}

# Whole programs of autograd and modules, each run as it is.
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def double_backward():
    x = leaf(3)
    (g,) = torch.autograd.grad(wave(x), x, create_graph=True)
    g.square().sum().backward()
    return g, x.grad


@program
def third_derivative():
    x = leaf(3)
    found = wave(x)
    for _ in range(3):
        (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found


@program
def backward_with_create_graph():
    x = leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wave(x).backward(create_graph=True)
    first = x.grad
    x.grad = None
    first.sum().backward()
    return first, x.grad


@program
def gradient_penalty():
    model, x = layers(), leaf(2, 4)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (g.norm() - 1).square().backward()
    return [p.grad for p in model.parameters()]


@program
def gradient_through_inputs_of_backward():
    x, w = leaf(3), leaf(3)
    (x * w).sum().backward(inputs=[w])
    return x.grad, w.grad


@program
def batched_gradients():
    x = leaf(3)
    return torch.autograd.grad(x.sin(), x, torch.eye(3), is_grads_batched=True)


@program
def unused_input():
    x, y = leaf(3), leaf(3)
    return torch.autograd.grad(x.sum(), (x, y), allow_unused=True)


@program
def unused_input_is_zero():
    x, y = leaf(3), leaf(3)
    return torch.autograd.grad(x.sum(), (x, y), materialize_grads=True)


@program
def unused_input_refused():
    return torch.autograd.grad(leaf(3).sum(), leaf(3))


@program
def functional_hessians():
    x = numbers(3)
    return functional_hessian(wave, x), hvp(wave, x, x), vhp(wave, x, x), jvp(torch.sin, x, x)


@program
def forward_mode():
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(numbers(3), numbers(3)).sin()).tangent


@program
def linearized():
    value, derivative = linearize(torch.sin, numbers(3))
    return value, derivative(numbers(3))


@program
def functionalized():
    return functionalize(lambda x: x.clone().add_(1).view(-1).mul_(2))(numbers(3))


@program
def functional_module():
    model = layers()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return grad(lambda w: functional_call(model, w, numbers(2, 4)).square().sum())(weights)


@program
def an_ensemble():
    models = [layers() for _ in range(2)]
    weights, buffers = stack_module_state(models)
    run = vmap(lambda w, b, x: functional_call(models[0], (w, b), x), in_dims=(0, 0, None))
    return run(weights, buffers, numbers(2, 4))


@program
def per_sample_gradients_of_a_module():
    model = layers()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(w, row):
        return functional_call(model, w, row).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(weights, numbers(3, 4))


@program
def vjp_of_vjp():
    x = numbers(3)

    def first(y):
        return vjp(torch.sin, y)[1](torch.ones(3))[0]

    return vjp(first, x)[1](torch.ones(3))


@program
def vjp_called_late_and_twice():
    value, pull = vjp(wave, numbers(3))
    return value, pull(torch.tensor(1.0), retain_graph=True), pull(torch.tensor(2.0))


@program
def transforms_around_autograd():
    x = leaf(3)
    loss = grad(lambda y: (y * x).sin().sum())(numbers(3)).sum()
    return torch.autograd.grad(loss, x)


@program
def autograd_in_a_transform():
    def inner(x):
        y = x.sin()
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum()

    return grad(inner)(numbers(3))


@program
def data_in_a_vmap_refused():
    return vmap(lambda x: x.sum().item())(numbers(2, 3))


@program
def custom_function_twice():
    x = leaf(3)
    (g,) = torch.autograd.grad(Cubed.apply(x).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


@program
def custom_function_in_transforms():
    return jacfwd(jacrev(CubedForAll.apply))(numbers(3)), hessian(
        lambda x: CubedForAll.apply(x).sum()
    )(numbers(3))


@program
def custom_function_once_differentiable():
    x = leaf(3)
    (g,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum() + x.sum(), x)


@program
def custom_function_without_vmap_refused():
    return vmap(Cubed.apply)(numbers(2, 3))


@program
def anomaly():
    x = leaf(3)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        Flawed.apply(x).sum().backward()


@program
def written_to_before_backward_refused():
    x = leaf(3)
    y = x.exp()
    y.mul_(2)
    y.sum().backward()


@program
def second_backward_refused():
    x = leaf(3)
    y = x.exp().sum()
    y.backward()
    y.backward()


@program
def hooks_on_tensors():
    x, calls = leaf(3), []
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: calls.append(g.clone()))
    x.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    y.retain_grad()
    y.sum().backward()
    return x.grad, y.grad, calls


@program
def hooks_on_nodes():
    x, calls = leaf(3), []
    y = x.sin().sum()
    y.grad_fn.register_prehook(lambda g: calls.append(g[0].clone()))
    y.grad_fn.register_hook(lambda g, _: calls.append(g[0].clone()))
    y.backward()
    return calls


@program
def hooks_on_several_tensors():
    x, y, calls = leaf(3), leaf(3), []
    graph.register_multi_grad_hook((x, y), lambda grads: calls.append([g is None for g in grads]))
    x.sin().sum().backward()
    (x * y).sum().backward()
    return calls


@program
def hooks_on_modules():
    model, calls = layers(), []
    model[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    model[0].register_forward_hook(lambda m, a, out: out + 1)
    model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 2,))
    model[2].register_full_backward_hook(lambda m, gi, go: calls.append(gi[0].clone()))
    model(leaf(2, 4)).sum().backward()
    return calls, [p.grad for p in model.parameters()]


@program
def hooks_on_all_modules():
    calls = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: calls.append(type(m).__name__)
    )
    layers()(numbers(2, 4))
    handle.remove()
    return calls


@program
def hooks_on_saved_tensors():
    x, packed = leaf(3), []
    with graph.saved_tensors_hooks(lambda t: (packed.append(1), t * 2)[1], lambda t: t / 2):
        y = x.exp().sin().sum()
    y.backward()
    return x.grad, len(packed)


@program
def saved_on_cpu():
    x = leaf(3)
    with graph.save_on_cpu():
        y = wave(x)
    y.backward()
    return x.grad


@program
def checkpointed():
    found = []
    for reentrant in (True, False):
        model, x = layers(), leaf(2, 4)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        found += [x.grad, *(p.grad for p in model.parameters())]
    return found


@program
def checkpointed_in_sequence():
    model, x = layers(), leaf(2, 4)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad


@program
def checkpointed_twice_differentiated():
    x = leaf(3)
    (g,) = torch.autograd.grad(checkpoint(wave, x, use_reentrant=False), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


@program
def gradient_edges():
    x = leaf(3)
    y = x.sin()
    edge = graph.get_gradient_edge(y)
    return torch.autograd.grad(y.cos().sum(), edge), edge.node.name()


@program
def backward_from_an_edge():
    x = leaf(3)
    torch.autograd.backward([graph.get_gradient_edge(x.sin())], [torch.ones(3)])
    return x.grad


@program
def names_of_nodes():
    y = (leaf(3) * 2).view(3, 1).expand(3, 2).sum()
    found = []
    while y is not None:
        node = getattr(y, "grad_fn", y)
        found.append(type(node).__name__)
        y = node.next_functions[0][0] if node.next_functions else None
    return found


@program
def inference_mode_refused():
    with torch.inference_mode():
        x = numbers(3)
    (x * leaf(3)).sum().backward()


@program
def sparse_gradients():
    table = nn.Embedding(5, 3, sparse=True)
    nn.init.ones_(table.weight)
    table(torch.tensor([1, 2, 2])).sum().backward()
    return table.weight.grad.to_dense(), table.weight.grad.is_sparse


@program
def accumulated_in_place():
    x = leaf(3)
    wave(x).backward()
    first = x.grad
    wave(x).backward()
    return x.grad is first, x.grad


@program
def clipped():
    model = layers()
    model(numbers(2, 4)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return norm, [p.grad for p in model.parameters()]


def trained(make, **options):
    model = layers()
    optimizer = make(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(numbers(2, 4)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


@program
def trained_by_sgd():
    return trained(torch.optim.SGD, momentum=0.9)


@program
def trained_by_adamw():
    return trained(torch.optim.AdamW), trained(torch.optim.AdamW, foreach=True)


@program
def normalised_over_a_batch():
    norm = nn.BatchNorm1d(4)
    found = [norm(numbers(3, 4)), norm.eval()(numbers(3, 4))]
    return found, norm.state_dict()


@program
def parametrised():
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    layer(numbers(2, 4)).sum().backward()
    return layer.parametrizations.weight.original.grad


@program
def recurrent():
    torch.manual_seed(0)
    cells = nn.LSTM(4, 3, batch_first=True)
    found = cells(numbers(2, 5, 4))[0]
    found.sum().backward()
    return found, [p.grad for p in cells.parameters()]


@program
def copied_and_saved():
    model, file = copy.deepcopy(layers()), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@program
def lazy_layers():
    layer = nn.LazyLinear(3)
    layer(numbers(2, 4))
    return layer.weight.shape


@program
def traced_to_a_graph():
    gm = torch.fx.experimental.proxy_tensor.make_fx(grad(wave))(numbers(3))
    return [str(node.target) for node in gm.graph.nodes], gm(numbers(3))


@program
def exported():
    found = torch.export.export(layers(), (numbers(2, 4),))
    return [str(node.target) for node in found.graph.nodes], found.module()(numbers(2, 4))


@program
def scripted():
    return torch.jit.trace(wave, numbers(3))(numbers(3))


# Programs that compile something themselves, with the backend that they are given.
COMPILED = {}


def compiled(function):
    COMPILED[function.__name__] = function
    return function


@compiled
def a_training_step(backend):
    model, x = layers(), leaf(2, 4)
    torch.compile(model, backend=backend)(x).square().sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@compiled
def a_module_compiled_in_place(backend):
    model = layers()
    model.compile(backend=backend)
    return model(numbers(2, 4))


@compiled
def double_backward_outside(backend):
    x = leaf(3)
    (g,) = torch.autograd.grad(torch.compile(wave, backend=backend)(x), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)


@compiled
def a_graph_break(backend):
    def run(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    x = leaf(3)
    torch.compile(run, backend=backend)(x).sum().backward()
    return x.grad


@compiled
def a_graph_break_refused(backend):
    def run(x):
        torch._dynamo.graph_break()
        return x.sin()

    return torch.compile(run, backend=backend, fullgraph=True)(numbers(3))


@compiled
def an_error_inside(backend):
    return torch.compile(lambda x: x @ x, backend=backend)(numbers(2, 3))


@compiled
def data_dependent(backend):
    run = torch.compile(lambda x: x[x > 0].unique(), backend=backend)
    return run(numbers(4))


@compiled
def a_value_read(backend):
    return torch.compile(lambda x: x * x.sum().item(), backend=backend)(numbers(3))


@compiled
def dynamic_sizes(backend):
    run = torch.compile(lambda x: x.sin().sum(0), backend=backend, dynamic=True)
    return [run(numbers(n, 4)) for n in (3, 5, 7)]


@compiled
def recompiles(backend):
    count = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = torch.compile(lambda x, k: x * k, backend=count)
    return [run(numbers(3), k) for k in (1, 2, 2.5, True)], count.frame_count


@compiled
def hooks_around(backend):
    model, calls = layers(), []
    run = torch.compile(model, backend=backend)
    model[0].register_forward_hook(lambda m, a, out: out * 2)
    model[2].register_full_backward_hook(lambda m, gi, go: calls.append(go[0].clone()))
    run(leaf(2, 4)).sum().backward()
    return calls, [p.grad for p in model.parameters()]


@compiled
def transforms_of_compiled(backend):
    return vmap(torch.compile(torch.sin, backend=backend))(numbers(2, 3))


@compiled
def custom_functions(backend):
    x = leaf(3)
    torch.compile(lambda x: Cubed.apply(x) + Once.apply(x), backend=backend)(x).sum().backward()
    return x.grad


@compiled
def an_optimizer(backend):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(numbers(2, 4)).square().sum().backward()
    torch.compile(optimizer.step, backend=backend)()
    return model.state_dict()


@compiled
def disabled_inside(backend):
    inner = torch.compiler.disable(torch.sin)
    return torch.compile(lambda x: inner(x) + 1, backend=backend)(numbers(3))


@compiled
def explained(backend):
    found = torch._dynamo.explain(wave)(numbers(3))
    return found.graph_count, found.graph_break_count, found.op_count


def outcome(run):
    """What a program returns; or its error, without addresses in memory."""
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '', first)}"


def check(run):
    without = outcome(run)
    with dynamo_dist.enabled():
        enabled = outcome(run)
    assert type(enabled) is type(without), (enabled, without)
    ours, theirs = map(torch.utils._pytree.tree_leaves, (enabled, without))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


# Seconds to trace, and much like others.
LONG = frozenset({"jacrev of jacfwd", "vmap of hessian", "jacfwd", "grad of grad"})


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, None) for name in FUNCTIONS]
    + [(name, "aot_eager") for name in FUNCTIONS if name not in LONG],
)
def test_functions_are_torchs(name, backend):
    function = FUNCTIONS[name]

    def run():
        ready = function if backend is None else torch.compile(function, backend=backend)
        x = leaf(3, 4)
        found = ready(x)
        leaves = [y for y in torch.utils._pytree.tree_leaves(found) if y.requires_grad]
        if leaves:
            torch.autograd.backward([y.sum() for y in leaves])
        return found, x.grad

    check(run)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_torchs(name):
    check(PROGRAMS[name])


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_are_torchs(name):
    check(lambda: COMPILED[name]("aot_eager"))


@pytest.mark.parametrize("name", ["a_graph_break", "recompiles", "hooks_around", "an_error_inside"])
def test_programs_without_a_compiler_are_torchs(name):
    check(lambda: COMPILED[name]("eager"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_training_step", "dynamic_sizes"])
def test_programs_by_inductor_are_torchs(name):
    def run():
        with torch._inductor.utils.fresh_cache():
            return COMPILED[name]("inductor")

    check(run)
