"""Gradients that a compiled graph adds by itself are those that autograd would have added."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from dynamo_dist.runtime import gradients
from dynamo_dist.runtime.gradients import DIRECT_GRADIENTS, Gradients
from inductor_passes.extension import in_work

pytestmark = pytest.mark.skipif(
    not gradients.gradients_patches(),
    reason="this torch wraps gradients in code that nothing can replace",
)

X = torch.arange(16.0).reshape(2, 8) / 8


def direct():
    """As in a compile that has its gradients added directly."""
    return in_work(SimpleNamespace(traits={DIRECT_GRADIENTS}))


@pytest.fixture
def given(monkeypatch):
    """How many gradients each backward left to autograd, as DTensors."""
    counts = []
    give = Gradients.give

    def counting(self, outs):
        result = give(self, outs)
        counts.append(sum(type(each) is DTensor for each in result))
        return result

    monkeypatch.setattr(Gradients, "give", counting)
    return counts


@pytest.fixture
def compile_(enabled):
    def backend(graph, inputs):
        with direct():
            return aot_eager(graph, inputs)

    return lambda fn: torch.compile(fn, backend=backend, fullgraph=True)


def weight(mesh, *placements, shape=(8, 8), requires_grad=True):
    torch.manual_seed(len(placements))
    full = torch.randn(*shape)
    spread = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return nn.Parameter(spread, requires_grad=requires_grad)


@pytest.fixture
def model(mesh):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(made, mesh["tp"], plan, src_data_rank=None)


def local(grad):
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def assert_same_gradients(ours, reference):
    for name, expected in reference.named_parameters():
        got = ours.get_parameter(name).grad
        if expected.grad is None:
            assert got is None, name
            continue
        assert type(got) is type(expected.grad), name
        assert got.placements == expected.grad.placements, name
        assert got._spec == expected.grad._spec and not got.requires_grad, name
        assert torch.equal(local(got), local(expected.grad)), name


def steps(module, forward, number=3):
    for _ in range(number):
        forward(X).square().sum().backward()


def test_accumulated_as_in_eager_and_in_place(model, compile_, given):
    eager = copy.deepcopy(model)
    steps(eager, eager)
    step = compile_(model)
    step(X).square().sum().backward()
    first = {name: p.grad for name, p in model.named_parameters()}
    versions = {name: p.grad._version for name, p in model.named_parameters()}
    steps(model, step, 2)
    assert_same_gradients(model, eager)
    for name, p in model.named_parameters():
        assert p.grad is first[name] and p.grad._version > versions[name]
    assert given == [0, 0, 0]


def test_zeroed_gradients_are_added_to_and_none_are_set(model, compile_, given):
    step = compile_(model)
    steps(model, step, 1)
    kept = model[0].weight.grad
    once = local(kept).clone()
    model.zero_grad(set_to_none=False)
    steps(model, step, 1)
    assert model[0].weight.grad is kept and torch.equal(local(kept), once)
    model.zero_grad()
    steps(model, step, 1)
    assert model[0].weight.grad is not kept and torch.equal(local(kept), once)
    assert given == [0, 0, 0]


def test_a_step_like_the_one_before_adds_all_at_once(model, compile_, monkeypatch):
    one_by_one = []
    add_each = Gradients._add_each
    monkeypatch.setattr(
        Gradients, "_add_each", lambda *args: (one_by_one.append(1), add_each(*args))
    )
    model[0].bias.requires_grad_(False)
    eager = copy.deepcopy(model)
    step = compile_(model)
    for set_to_none in (True, False, True):
        steps(eager, eager, 2)
        steps(model, step, 2)
        assert_same_gradients(model, eager)
        for module in (model, eager):
            module.zero_grad(set_to_none)
    assert one_by_one == [1]
    steps(model, step, 1)
    steps(eager, eager, 1)
    torch.optim.AdamW(model.parameters()).step()
    torch.optim.AdamW(eager.parameters()).step()
    steps(model, step, 1)
    steps(eager, eager, 1)
    assert_same_gradients(model, eager)
    model[2].weight.grad = None  # unlike before: some have a gradient and one has none
    eager[2].weight.grad = None
    steps(model, step, 1)
    steps(eager, eager, 1)
    assert_same_gradients(model, eager)
    assert one_by_one == [1, 1]


@pytest.mark.parametrize("kind", ["tensor", "after", "pre", "post"])
def test_a_hook_is_given_the_gradient(model, compile_, given, kind):
    eager = copy.deepcopy(model)
    steps(eager, eager, 2)
    step = compile_(model)
    steps(model, step, 1)
    seen = []
    parameter = model[0].weight
    accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    handle = {
        "tensor": lambda: parameter.register_hook(lambda grad: seen.append(grad)),
        "after": lambda: parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad)
        ),
        "pre": lambda: accumulator.register_prehook(lambda grads: seen.append(grads[0])),
        "post": lambda: accumulator.register_hook(lambda ins, outs: seen.append(outs[0])),
    }[kind]()
    steps(model, step, 1)
    assert_same_gradients(model, eager)
    (grad,) = seen
    assert type(grad) is DTensor
    if kind == "after":
        assert grad is parameter.grad
    else:
        assert not torch.equal(local(grad), local(parameter.grad))
    handle.remove()
    steps(model, step, 1)
    assert given == [0, 1, 0] and len(seen) == 1


def test_a_hook_from_before_enabling_is_given_the_gradient(mesh, given):
    seen = []
    parameter = weight(mesh["tp"], Shard(0))
    accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda ins, outs: seen.append(outs[0]))
    with dynamo_dist.enabled(), direct():
        step = torch.compile(lambda w: w.square().sum(), backend="aot_eager", fullgraph=True)
        step(parameter).to_local().backward()
    assert type(seen[0]) is DTensor and given == [1]


def test_grad_and_backward_of_some_inputs(model, compile_):
    eager = copy.deepcopy(model)
    step = compile_(model)
    got = torch.autograd.grad(step(X).square().sum(), [model[0].weight, model[2].bias])
    expected = torch.autograd.grad(eager(X).square().sum(), [eager[0].weight, eager[2].bias])
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.placements == theirs.placements and torch.equal(local(ours), local(theirs))
    assert_same_gradients(model, eager)
    step(X).square().sum().backward(inputs=[model[2].weight])
    eager(X).square().sum().backward(inputs=[eager[2].weight])
    assert model[0].weight.grad is None
    assert_same_gradients(model, eager)


def test_partial_gradients_of_replicated_parameters_stay(mesh, compile_, given):
    x = distribute_tensor(torch.randn(8, 8), mesh["tp"], [Shard(0)], src_data_rank=None)
    eager, ours = (weight(mesh["tp"], Replicate()) for _ in range(2))

    def fn(w):
        return (x @ w).square().sum()

    step = compile_(fn)
    for _ in range(3):
        fn(eager).backward()
        step(ours).backward()
    assert eager.grad.placements == ours.grad.placements == (Partial(),)
    assert torch.allclose(local(eager.grad), local(ours.grad)) and given == [0, 0, 0]


def test_a_gradient_that_lies_elsewhere_is_added_to_by_autograd(mesh, compile_, given):
    ours = weight(mesh["tp"], Shard(0))
    ours.grad = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Replicate()], src_data_rank=None)
    compile_(lambda w: (w * w).sum())(ours).backward()
    assert given == [1]
    assert torch.equal(local(ours.grad.redistribute(placements=[Shard(0)])), 1 + 2 * local(ours))


def test_a_parameter_that_wants_its_gradient_in_another_dtype(mesh, compile_, given):
    eager, ours = weight(mesh["tp"], Shard(0)), weight(mesh["tp"], Shard(0))
    step = compile_(lambda w: (w * w).sum())
    for parameter, forward in ((eager, lambda w: (w * w).sum()), (ours, step)):
        forward(parameter).backward()
        parameter.grad = None
        parameter.grad_dtype = torch.float64
        forward(parameter).backward()
    assert given == [0, 1]
    assert ours.grad.dtype == eager.grad.dtype == torch.float64
    assert torch.equal(local(ours.grad), local(eager.grad))


def test_other_parameters_between_steps(model, compile_, mesh, given):
    eager = copy.deepcopy(model)
    step = compile_(model)

    def patch(both):
        for module in (model, eager):
            both(module)
        for module, forward in ((model, step), (eager, eager)):
            forward(X.to(module[0].weight.dtype)).square().sum().backward()
        assert_same_gradients(model, eager)

    def replaced(module):
        module[0].weight = weight(mesh["tp"], Replicate())

    def assigned(module):
        state = {name: t.detach().double() for name, t in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        for parameter in module.parameters():
            parameter.grad = None

    def frozen(module):
        module[2].weight.requires_grad_(False)

    for both in (lambda module: None, replaced, assigned, frozen):
        patch(both)
    assert sum(given) == 0


def test_a_parameter_in_two_places_and_in_two_graphs(mesh, compile_, given):
    eager, ours = (weight(mesh["tp"], Shard(1)) for _ in range(2))
    x = distribute_tensor(X, mesh["tp"], [Replicate()], src_data_rank=None)

    def tied(w, again):
        return ((x @ w) * (x @ again)).sum()

    def other(w):
        return (x @ w).exp().sum()

    first, second = compile_(tied), compile_(other)
    for _ in range(3):
        (tied(eager, eager) + other(eager)).backward()
        (first(ours, ours) + second(ours)).backward()
    assert ours.grad.placements == eager.grad.placements
    assert torch.allclose(local(ours.grad), local(eager.grad)) and sum(given) == 0


def test_one_tensor_as_the_gradient_of_two_parameters(mesh, compile_):
    a, b = weight(mesh["tp"], Shard(0)), weight(mesh["tp"], Shard(0))
    step = compile_(lambda a, b: ((a + b) * 2).sum())
    for times in (2, 4):
        step(a, b).backward()
        for parameter in (a, b):
            assert torch.equal(local(parameter.grad), torch.full_like(local(parameter.grad), times))


def test_tensors_that_are_no_leaves_and_dtensor_outputs(mesh, compile_, given):
    a, b = weight(mesh["tp"], Shard(0)), weight(mesh["tp"], Shard(0))
    step = compile_(lambda a, b: a * b)
    out = step(a * 2, b)
    assert type(out) is DTensor
    out.backward(torch.ones_like(out))
    assert torch.equal(local(a.grad), 2 * local(b))
    assert torch.equal(local(b.grad), 2 * local(a))
    assert given == [1]


def test_again_through_the_same_graph(model, compile_):
    eager = copy.deepcopy(model)
    for forward in (compile_(model), eager):
        loss = forward(X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("inside", [False, True])
def test_checkpointed(model, compile_, given, inside):
    eager = copy.deepcopy(model)

    def twice(module):
        def inner(x):
            return module(x).relu()

        return inner

    def recomputed(x, through):
        return checkpoint(through, x, use_reentrant=False)

    if inside:
        step = compile_(lambda x: recomputed(x, twice(model)))
    else:
        compiled = compile_(twice(model))

        def step(x):
            return recomputed(x, compiled)

    steps(eager, lambda x: recomputed(x, twice(eager)))
    steps(model, step)
    assert_same_gradients(model, eager)
    assert given == [0, 0, 0]


def test_steps_without_gradients_and_with_hooks_elsewhere(model, compile_, given):
    eager = copy.deepcopy(model)
    step = compile_(model)
    for module, forward in ((eager, eager), (model, step)):
        for _ in range(3):
            with torch.no_grad():
                forward(X)
            out = forward(X)
            out.register_hook(lambda grad: grad * 2)  # as a program may, anew on every step
            out.sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
    assert_same_gradients(model, eager)
    assert given == [0, 0, 0]


def test_anomaly_mode_finds_the_backward_that_made_nan(mesh, compile_):
    a = weight(mesh["tp"], Shard(0))
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        loss = compile_(lambda a: (a * float("nan")).sum())(a).to_local()
        with pytest.raises(RuntimeError, match="nan values"):
            loss.backward()


def test_after_disable_and_where_it_is_not_wanted(model, given):
    eager = copy.deepcopy(model)
    steps(eager, eager)
    with dynamo_dist.enabled():
        step = torch.compile(model, backend="aot_eager", fullgraph=True)
        steps(model, step, 1)
        assert given == []
        torch.compiler.reset()
        with direct():
            steps(model, step, 1)
        assert given == [0]
    steps(model, step, 1)
    assert given == [0, 4]
    assert_same_gradients(model, eager)


def test_a_torch_without_the_seam_keeps_upstreams_way(monkeypatch):
    monkeypatch.setattr(gradients.aot_gradients, "_hook_owner", None)
    assert gradients.gradients_patches() == []
