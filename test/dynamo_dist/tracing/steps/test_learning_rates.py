"""Learning rates that change are inputs of a whole step's graph: no other graph for another rate."""

import pytest
import torch
import whole_step
from torch.optim import lr_scheduler

STEPS = 50
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scheduler_outside_of_the_graph(name):
    def build():
        model = whole_step.network(bias=False)
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        return model.parameters(), whole_step.plain_step(model, optimizer), scheduler.step

    whole_step.compare(build, whole_step.batches(8), tolerance=2e-5)


def test_rate_that_the_program_sets_in_groups():
    def build():
        model = whole_step.network(bias=False)
        groups = [{"params": [each], "lr": 0.1} for each in model.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)

        def between():
            for i, group in enumerate(optimizer.param_groups):
                group["lr"] *= 0.9 - i / 10

        return model.parameters(), whole_step.plain_step(model, optimizer), between

    whole_step.compare(build, whole_step.batches(STEPS))


def test_step_that_begins_with_zero_grad_and_returns_its_rate():
    def build():
        model = whole_step.network(bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return optimizer.param_groups[0]["lr"]

        return model.parameters(), step, scheduler.step

    whole_step.compare(build)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_rate_of_zero_keeps_rows_without_gradients(how, breaks):
    def build():
        torch.manual_seed(0)
        words = torch.nn.Embedding(8, 4)
        optimizer = torch.optim.AdamW(words.parameters(), lr=0.01, **how)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: i / 2)  # a warm-up begins at 0

        def step(x):
            loss = words(x).square().mean()
            loss.backward()
            if breaks:  # the update is then a graph of its own
                torch._dynamo.graph_break()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss

        return words.parameters(), step

    graphs = None if breaks else 1
    inputs = [torch.tensor([1, 2, 3])] * 3
    whole_step.compare(build, inputs, tolerance=2e-5, graphs=graphs, fullgraph=not breaks)


def test_last_rates_are_read_and_a_scheduler_steps_twice():
    def build():
        model = whole_step.network(bias=False)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

        def step(x):
            (rate,) = scheduler.get_last_lr()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            scheduler.step()
            optimizer.zero_grad()
            return rate

        return model.parameters(), step

    whole_step.compare(build)


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "warmup": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_in_the_graph(name):
    made = []

    def build():
        model = whole_step.network(bias=False)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scheduler = SCHEDULERS[name](optimizer)
        made.append(scheduler)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if name == "plateau":
                scheduler.step(loss.detach())
            else:
                scheduler.step()
            optimizer.zero_grad()
            return loss

        return model.parameters(), step

    whole_step.compare(build, whole_step.batches(8))
    assert made[0].get_last_lr() == made[1].get_last_lr()
    assert made[0].last_epoch == made[1].last_epoch


def rate_from_groups(optimizer, scheduler, x):
    return optimizer.param_groups[0]["lr"]


def rate_from_the_scheduler(optimizer, scheduler, x):
    return scheduler.get_last_lr()[0]


def another_step(optimizer, scheduler, x):
    optimizer.step()
    return x


@pytest.mark.parametrize("read", [rate_from_groups, rate_from_the_scheduler, another_step])
def test_what_reads_the_rate_behind_a_scheduler_breaks(read):
    def build():
        model = whole_step.network(bias=False)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            result = read(optimizer, scheduler, x)
            optimizer.zero_grad()
            return result

        return model.parameters(), step

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"scheduler\.step|lr_scheduler\.py"):
        whole_step.compare(build)
    whole_step.compare(build, graphs=None, fullgraph=False)
