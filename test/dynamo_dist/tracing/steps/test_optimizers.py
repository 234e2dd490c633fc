"""Every optimizer of torch.optim in one graph with forward and backward, beside eager."""

import inspect

import pytest
import torch
import whole_step
from torch import nn

OPTIONS = {"SGD": {"lr": 0.05}}
# Optimizers that need another loop than everybody's.
OTHERS = {"LBFGS", "SparseAdam"}
# It reads its step as a number, which fullgraph=True would capture and Inductor refuse.
READS_ITS_STEP = ("Adafactor", "for-loop")


def forms():
    for name in torch.optim.__all__:
        cls = getattr(torch.optim, name)
        if not isinstance(cls, type) or name in {"Optimizer", *OTHERS}:
            continue
        options = inspect.signature(cls).parameters
        yield name, "for-loop", {"foreach": False} if "foreach" in options else {}
        yield from ((name, form, {form: True}) for form in ("foreach", "fused") if form in options)


FORMS = {
    **{(name, form): options for name, form, options in forms()},
    ("SGD", "momentum"): {"momentum": 0.9, "weight_decay": 0.1, "foreach": False},
    ("SGD", "nesterov"): {"momentum": 0.9, "nesterov": True, "foreach": True},
    ("SGD", "fused momentum"): {"momentum": 0.9, "fused": True},
    ("RMSprop", "centered"): {"centered": True, "momentum": 0.9, "foreach": True},
    ("Adam", "amsgrad"): {"amsgrad": True, "foreach": True},
    ("Adam", "maximize"): {"maximize": True, "foreach": False},
    ("AdamW", "tensor as rate"): {"lr": torch.tensor(1e-3)},
}


def build(name, options):
    # Muon takes matrices alone.
    model = whole_step.network(bias=False)
    cls = getattr(torch.optim, name)
    optimizer = cls(model.parameters(), **{**OPTIONS.get(name, {}), **options})
    return model.parameters(), whole_step.plain_step(model, optimizer)


# One of each kind of loop; all of them are seconds.
FAST = {
    ("SGD", "momentum"),
    ("SGD", "fused momentum"),
    ("Adam", "foreach"),
    ("AdamW", "for-loop"),
    ("AdamW", "fused"),
    ("AdamW", "tensor as rate"),
    ("Muon", "for-loop"),
}
WHOLE = [
    pytest.param(*each, id=" ".join(each), marks=() if each in FAST else pytest.mark.slow)
    for each in FORMS
    if each != READS_ITS_STEP
]


@pytest.mark.parametrize(("name", "form"), WHOLE)
def test_step_is_one_graph_with_eagers_numbers(name, form):
    # Powers of the number of steps are in double precision, as eager mode's; a rate is as given.
    is_precise = name in {"Adam", "AdamW"} and "lr" not in FORMS[name, form]
    tolerance = 1e-12 if is_precise else 1e-6
    whole_step.compare(lambda: build(name, FORMS[name, form]), tolerance=tolerance)


def test_adafactors_loop_breaks_where_it_reads_its_step():
    whole_step.compare(lambda: build("Adafactor", {"foreach": False}), graphs=None, fullgraph=False)


def test_first_momentum_that_is_not_dampened_takes_a_second_graph():
    options = {"momentum": 0.9, "dampening": 0.5}
    whole_step.compare(lambda: build("SGD", options), graphs=2)


def lbfgs():
    model = whole_step.network(bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return model.parameters(), whole_step.closure_step(model, optimizer)


def sparse_adam():
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step(x):
        loss = table(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return table.parameters(), step


INPUTS = {lbfgs: None, sparse_adam: [torch.tensor([1, 2, each]) for each in range(3)]}


@pytest.mark.parametrize("make", INPUTS)
def test_optimizers_that_torch_does_not_trace_run_eagerly(make):
    whole_step.compare(make, INPUTS[make], graphs=None, fullgraph=False)


@pytest.mark.parametrize("make", INPUTS)
def test_optimizers_that_torch_does_not_trace_say_why(make):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"step not supported|[Ss]parse"):
        whole_step.compare(make, INPUTS[make])
