"""Parameters registered as local tensors: the module computes, saves and loads as with DTensors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dynamo_dist
from dynamo_dist.errors import LocalizeError
from dynamo_dist.testing import count_graph_breaks

X = torch.arange(24.0).reshape(3, 8) / 8
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
OTHER = {"0": ColwiseParallel(output_layouts=Replicate())}


def mlp(mesh, plan=PLAN):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return parallelize_module(made, mesh["tp"], plan, src_data_rank=None)


def registered(model):
    return dict(model.named_parameters())


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(localized, reference):
    assert [n for n, _ in localized.named_parameters()] == [
        n for n, _ in reference.named_parameters()
    ]
    for (name, ours), theirs in zip(
        localized.named_parameters(), reference.parameters(), strict=True
    ):
        assert type(ours) is nn.Parameter and type(ours.grad) is torch.Tensor, name
        assert torch.allclose(ours.grad, local(theirs.grad)), name


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_and_gradients_are_those_of_dtensors(mesh, enabled, compiled):
    reference, model = mlp(mesh), dynamo_dist.localize(mlp(mesh))
    step = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):
        expected, got = reference(X), step(X)
        assert torch.equal(got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
    assert_same_gradients(model, reference)
    assert model[0].weight.placements == reference[0].weight.placements
    assert model[0].weight._spec == reference[0].weight._spec


def test_gradients_from_before_are_kept_and_added_to(mesh):
    reference, model = mlp(mesh), mlp(mesh)
    for module in (reference, model):
        module(X).square().sum().backward()
    dynamo_dist.localize(model)
    for module in (reference, model):
        module(X).square().sum().backward()
    assert_same_gradients(model, reference)


def test_state_is_of_dtensors_both_ways(mesh):
    reference, model = mlp(mesh), dynamo_dist.localize(mlp(mesh))
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, expected in reference.state_dict().items():
        assert state[name]._spec == expected._spec and not state[name].requires_grad
        assert torch.equal(local(state[name]), local(expected))
    with torch.no_grad():
        model[0].weight.to_local().fill_(7.0)
    assert local(state["0.weight"]).eq(7).all() and registered(model)["0.weight"].eq(7).all()
    reference.load_state_dict(state)
    assert local(reference[0].weight).eq(7).all()
    model.load_state_dict(
        {name: torch.zeros(value.shape) for name, value in state.items()}, assign=True
    )
    assert registered(model)["0.weight"].shape == (2, 8)
    assert torch.equal(model(X), torch.zeros(3, 8))
    assert state["0.weight"].shape == (8, 8)


def test_one_parameter_in_two_places_stays_one(mesh):
    model = mlp(mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})
    model[2].weight = model[0].weight
    dynamo_dist.localize(model)
    assert model._modules["0"]._parameters["weight"] is model._modules["2"]._parameters["weight"]
    assert len(list(model.parameters())) == 3


def test_a_dtensor_set_later_is_read_as_it_is(mesh):
    reference, model = mlp(mesh), dynamo_dist.localize(mlp(mesh))
    for module in (reference, model):
        module[0].weight = spread(mesh, Shard(0))
    assert torch.equal(model(X), reference(X))
    assert type(model.state_dict()["0.weight"]) is DTensor
    model.load_state_dict(mlp(mesh).state_dict())
    assert torch.equal(model(X), mlp(mesh)(X))


def test_modules_alike_share_compiled_code(mesh, enabled):
    layers = [dynamo_dist.localize(mlp(mesh)) for _ in range(3)]
    assert type(layers[0][0]) is type(layers[1][0]) is not type(layers[0][2])

    def step(layer, x):
        return layer(x)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected = [compiled(layer, X) for layer in layers]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(layers[0].double().float(), X), expected[0])


def test_another_layout_and_dtype_are_compiled_anew(mesh, enabled):
    model, other = dynamo_dist.localize(mlp(mesh)), mlp(mesh, OTHER)
    dynamo_dist.localize(other)
    step = torch.compile(lambda m, x: m(x), backend="aot_eager", fullgraph=True)
    for module in (model, other):
        assert torch.equal(step(module, X), module(X))
    model.double()
    assert torch.equal(step(model, X.double()), model(X.double()))


def test_norms_over_all_ranks_are_of_the_dtensors(mesh):
    reference, model = mlp(mesh), dynamo_dist.localize(mlp(mesh))
    for module in (reference, model):
        module(X).square().sum().backward()
    whole = dynamo_dist.localized_dtensors(model)
    assert list(whole) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    ours = nn.utils.clip_grad_norm_(whole.values(), 1e-3)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    assert ours.placements == theirs.placements and torch.allclose(local(ours), local(theirs))
    assert_same_gradients(model, reference)
    model[2].weight = None
    assert list(dynamo_dist.localized_dtensors(copy.deepcopy(model))) == [
        "0.weight",
        "0.bias",
        "2.bias",
    ]


def test_partial_gradients_of_replicas_are_reduced_in_the_graph(mesh, enabled):
    torch.manual_seed(0)
    model = parallelize_module(
        nn.Sequential(nn.LayerNorm(8)), mesh["tp"], {"0": SequenceParallel(sequence_dim=0)}
    )
    dynamo_dist.localize(model)
    x = distribute_tensor(torch.ones(4, 8), mesh["tp"], [Shard(0)], src_data_rank=None)
    assert count_graph_breaks(lambda: model(x).to_local().sum()) == 0
    model(x).to_local().sum().backward()
    assert registered(model)["0.weight"].grad.shape == (8,)


def spread(mesh, placement):
    tensor = distribute_tensor(torch.ones(8, 8), mesh["tp"], [Replicate()], src_data_rank=None)
    return nn.Parameter(tensor.redistribute(placements=[placement]).detach())


def hooked(mesh):
    model = mlp(mesh)
    model[2].weight.register_hook(lambda grad: grad)
    return model


def summed(mesh):
    model = mlp(mesh)
    model[2].weight = nn.Parameter(
        DTensor.from_local(torch.ones(8, 8), mesh["tp"], [Partial()], run_check=False)
    )
    return model


def recurrent(mesh):
    model = nn.Sequential(mlp(mesh), nn.GRU(8, 8))
    model[1].weight_ih_l0 = spread(mesh, Replicate())
    return model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda mesh: nn.Linear(2, 2), "no parameter of the module is a DTensor. Call localize"),
        (hooked, "2.weight has hooks on its gradient. They would be given a local tensor."),
        (summed, "2.weight is a sum of parts"),
        (recurrent, "1 is a GRU. It holds its parameters a second time"),
        (
            lambda mesh: dynamo_dist.data_parallel(nn.Linear(8, 8), mesh["tp"]),
            "the module is data parallel. What gathers its parameters needs them as DTensors.",
        ),
        (lambda mesh: dynamo_dist.localize(mlp(mesh)), "no parameter of the module is a DTensor."),
    ],
)
def test_what_it_cannot_take_is_left_as_it_was(mesh, make, message):
    model = make(mesh)
    before = dict(model.named_parameters())
    classes = [type(each) for each in model.modules()]
    with pytest.raises(LocalizeError, match=message):
        dynamo_dist.localize(model)
    assert classes == [type(each) for each in model.modules()]
    for name, param in model.named_parameters():
        assert before[name] is param
