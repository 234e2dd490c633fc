"""What training steps hold beside a plain backward and an update: one graph, eager's numbers."""

import copy

import pytest
import torch
import whole_step
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

ADAMW = {"lr": 0.01, "foreach": True}


def parts(cls=torch.optim.AdamW, **options):
    model = whole_step.network()
    return model, cls(model.parameters(), **(options or ADAMW))


def clipped_by_norm():
    model, optimizer = parts()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return model.parameters(), step


def clipped_by_value():
    model, optimizer = parts()

    def step(x):
        model(x).square().mean().backward()
        clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return model.parameters(), step


def accumulated():
    model, optimizer = parts()

    def step(x):
        total = 0.0
        for micro in x.chunk(2):
            loss = model(micro).square().mean() / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return model.parameters(), step


def averaged_weights():
    model, optimizer = parts()
    average = whole_step.network()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    return [*model.parameters(), *average.parameters()], step


def under_autocast():
    model, optimizer = parts()
    model.float()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x.float()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [], step


def two_models():
    (one, first), (two, second) = parts(), parts(torch.optim.SGD, lr=0.05, momentum=0.9)

    def step(x):
        made = one(x)
        loss = (two(made.detach()) - 1).square().mean()
        loss.backward()
        second.step()
        second.zero_grad()
        other = two(made).square().mean()
        other.backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
        return loss, other

    return [*one.parameters(), *two.parameters()], step


def gradients_set_to_zero():
    model, optimizer = parts()

    def step(x):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model.parameters(), step


def gradients_that_stay():
    """Without ``zero_grad`` they add up over the calls."""
    model, optimizer = parts()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss, [parameter.grad.sum() for parameter in model.parameters()]

    return model.parameters(), step


def several_backwards():
    model, optimizer = parts()

    def step(x):
        made = model(x)
        made.square().mean().backward(retain_graph=True)
        made.backward(gradient=torch.ones_like(made) / 7)
        optimizer.step()
        optimizer.zero_grad()

    return model.parameters(), step


def some_inputs():
    model, optimizer = parts()

    def step(x):
        loss = model(x).square().mean()
        loss.backward(inputs=[model[0].weight])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model.parameters(), step


def gradient_beside():
    """``torch.autograd.grad`` of a penalty beside the backward."""
    model, optimizer = parts()

    def step(x):
        loss = model(x).square().mean()
        slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        whole = loss + sum(slope.square().sum() for slope in slopes)
        whole.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, whole

    return model.parameters(), step


def groups_and_parameters_without_gradient():
    model = whole_step.network()
    idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, idle], "weight_decay": 0.1, "lr": 0.02},
            {"params": [model[0].bias, *model[2].parameters()], "weight_decay": 0.0},
        ],
        **ADAMW,
    )
    return [*model.parameters(), idle], whole_step.plain_step(model, optimizer)


def hooks_of_the_optimizer():
    model, optimizer = parts()
    count = torch.zeros(1)

    def clip(optimizer, args, kwargs):
        clip_grad_value_(model.parameters(), 0.01)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: count.add_(1))
    return [*model.parameters(), count], whole_step.plain_step(model, optimizer)


class Signs(torch.optim.Optimizer):
    """A user's optimizer whose states are there from the start."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter]["mean"]
                mean.lerp_(parameter.grad, 0.1)
                parameter.add_(mean.sign(), alpha=-group["lr"])


def users_optimizer():
    model = whole_step.network()
    return model.parameters(), whole_step.plain_step(model, Signs(model.parameters()))


class Decaying(torch.optim.AdamW):
    """A user's optimizer that adds to one of torch's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


def users_subclass():
    model, optimizer = parts(Decaying)
    return model.parameters(), whole_step.plain_step(model, optimizer)


def gradients_in_the_program():
    """A step that changes gradients by hand."""
    model, optimizer = parts(torch.optim.SGD, lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad / 2
            parameter.grad.add_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model.parameters(), step


STEPS = [
    clipped_by_norm,
    clipped_by_value,
    accumulated,
    averaged_weights,
    two_models,
    several_backwards,
    some_inputs,
    gradient_beside,
    groups_and_parameters_without_gradient,
    hooks_of_the_optimizer,
    users_optimizer,
    users_subclass,
    gradients_in_the_program,
]


@pytest.mark.parametrize("build", STEPS)
def test_step_is_one_graph_with_eagers_numbers(build):
    whole_step.compare(build)


@pytest.mark.parametrize("build", [gradients_set_to_zero, gradients_that_stay])
def test_gradients_of_the_call_before_take_a_second_graph(build):
    whole_step.compare(build, graphs=2)


def test_step_under_autocast_is_one_graph():
    whole_step.compare(under_autocast, tolerance=2e-2)


def hook_of_a_parameter():
    model, optimizer = parts()
    model[0].weight.register_hook(lambda gradient: None)
    return model.parameters(), whole_step.plain_step(model, optimizer)


def test_hook_of_a_parameter_breaks_with_its_reason():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="A hook stands on a tensor"):
        whole_step.compare(hook_of_a_parameter)
    whole_step.compare(hook_of_a_parameter, graphs=None, fullgraph=False)


def loss_alone(model):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


def optimizer_in_backward():
    """As torch's tutorial writes it: an optimizer for each parameter, looked up in a hook."""
    model = whole_step.network()
    optimizers = {each: torch.optim.AdamW([each], **ADAMW) for each in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    return model.parameters(), loss_alone(model)


class Update:
    def __init__(self, parameter):
        self.optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)

    def run(self, parameter):
        self.optimizer.step()
        parameter.grad = None


def optimizers_in_methods():
    model = whole_step.network()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(Update(each).run)
    return model.parameters(), loss_alone(model)


def halve(parameter):
    parameter.grad.mul_(0.5)


def clamp(parameter):
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def gradients_scaled_in_hooks():
    model, optimizer = parts()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(halve)
        each.register_post_accumulate_grad_hook(clamp)
    return model.parameters(), whole_step.plain_step(model, optimizer)


def hook_of_an_unused_parameter():
    model, optimizer = parts()
    idle = nn.Parameter(torch.ones(3, dtype=torch.float64))
    idle.register_post_accumulate_grad_hook(halve)
    total = whole_step.plain_step(model, optimizer)
    return [*model.parameters(), idle], lambda x: (total(x), idle.detach() + 1)


@pytest.mark.parametrize(
    "build",
    [
        optimizer_in_backward,
        optimizers_in_methods,
        gradients_scaled_in_hooks,
        hook_of_an_unused_parameter,
    ],
)
def test_hooks_behind_accumulation_are_in_the_graph(build):
    whole_step.compare(build)


def test_dynamo_does_not_start_over_behind_aotautograd():
    whole_step.compare(optimizer_in_backward)
    assert counters["aot_autograd"]["total"] == 1


def test_hook_behind_accumulation_that_comes_later_takes_a_second_graph():
    def build():
        model, optimizer = parts()
        added = []

        def between():
            if not added:
                added.append(model[0].weight.register_post_accumulate_grad_hook(halve))

        return model.parameters(), whole_step.plain_step(model, optimizer), between

    whole_step.compare(build, graphs=2)


def test_hook_behind_accumulation_that_breaks_runs_as_eagerly():
    def build():
        model, optimizer = parts()
        seen = []
        model[0].weight.register_post_accumulate_grad_hook(
            lambda given: seen.append(given.grad.sum().item())
        )
        step = whole_step.plain_step(model, optimizer)
        return model.parameters(), lambda x: (step(x), seen[-1])

    whole_step.compare(build, graphs=None, fullgraph=False)


def with_closure():
    model, optimizer = parts()
    return model.parameters(), whole_step.closure_step(model, optimizer)


def test_closure_runs_as_eagerly():
    whole_step.compare(with_closure, graphs=None, fullgraph=False)


def with_scaler():
    model, optimizer = parts(torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    return model.parameters(), step


def test_scaled_step_runs_as_eagerly():
    inputs = whole_step.batches(3)
    inputs[1] = inputs[1] * float("inf")  # this step is left out, and the scale halved
    whole_step.compare(with_scaler, inputs, graphs=None, fullgraph=False)


def test_result_that_a_backward_used_up_has_no_history():
    model, optimizer = parts()
    step = torch.compile(whole_step.plain_step(model, optimizer), backend="dynamo_dist")
    assert not step(whole_step.batches(1)[0]).requires_grad


def test_result_whose_history_saved_nothing_keeps_it():
    shift = torch.zeros(8, dtype=torch.float64, requires_grad=True)

    def step(x):
        y = x + shift
        y.sum().backward()
        return y

    assert torch.compile(step, backend="dynamo_dist")(whole_step.batches(1)[0]).requires_grad


def test_parameters_that_the_optimizer_shows_first_get_gradients():
    def build():
        model, optimizer = parts()

        def step(x):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            model(x).square().mean().backward()
            optimizer.step()

        return model.parameters(), step

    whole_step.compare(build)


def loss_from_outside():
    model, optimizer = parts()

    def step(x):
        loss = model(x).square().mean()
        torch._dynamo.graph_break()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model.parameters(), step


def test_backward_of_a_loss_from_another_graph_runs_eagerly():
    whole_step.compare(loss_from_outside, graphs=None, fullgraph=False)


def test_states_that_are_loaded_between_steps_are_read():
    def build():
        model, optimizer = parts()

        def between():
            state = copy.deepcopy(optimizer.state_dict())
            for each in state["state"].values():
                each["exp_avg"] /= 2
            optimizer.load_state_dict(state)

        return model.parameters(), whole_step.plain_step(model, optimizer), between

    whole_step.compare(build)


def test_parameter_that_is_frozen_between_steps_stays():
    def build():
        model, optimizer = parts()
        return (
            model.parameters(),
            whole_step.plain_step(model, optimizer),
            lambda: model[0].weight.requires_grad_(False),
        )

    whole_step.compare(build, graphs=2)
