import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dynamo_dist.benchmark import state
from dynamo_dist.errors import CompareError
from inductor_passes.testing import fake_group


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def test_a_model_that_was_run_is_as_it_was():
    module = model()
    module[0].weight.grad = torch.ones(4, 4)
    module[2].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rng = torch.get_rng_state()
    with state.kept(module, torch.device("cpu")) as saved:
        module.train()
        module(torch.randn(8, 4)).sum().backward()
        with torch.no_grad():
            module[0].weight.add_(1)
        assert saved.drew_random_numbers()
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(module[0].weight.grad, torch.ones(4, 4)) and module[0].bias.grad is None
    assert module.training and not module[2].training
    assert torch.equal(torch.get_rng_state(), rng)


def test_it_is_restored_after_an_exception():
    module = model()
    before = module[0].weight.clone()
    with pytest.raises(ValueError), state.kept(module, torch.device("cpu")):
        nn.init.zeros_(module[0].weight)
        raise ValueError
    assert torch.equal(module[0].weight, before)


def test_sharded_parameters_are_kept_too():
    with fake_group(world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        before = module.weight.to_local().clone()
        with state.kept(module, torch.device("cpu")), torch.no_grad():
            module.weight.to_local().zero_()
        assert isinstance(module.weight, DTensor)
        assert torch.equal(module.weight.to_local(), before)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [(1, (1,), {}), ((1, 2), (1, 2), {}), ([1, 2], (1, 2), {}), ({"a": 1}, (), {"a": 1})],
)
def test_what_inputs_may_be(inputs, args, kwargs):
    assert state.as_call(inputs) == (args, kwargs)


def test_inputs_are_copied_with_their_gradient_flag():
    given = {"x": torch.ones(2, requires_grad=True), "n": 3}
    copy = state.fresh_copy(given)
    assert copy["x"] is not given["x"] and copy["x"].requires_grad and copy["x"].is_leaf
    assert copy["n"] == 3


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    states: tuple


def test_every_tensor_has_a_path():
    tree = {"a": [torch.zeros(1), 2], "b": Output(torch.zeros(1), (None, torch.zeros(1)))}
    names = [name for name, _ in state.tensors_of(tree)]
    assert names == ["output['a'][0]", "output['b'].loss", "output['b'].states[1]"]


def test_gradients_of_parameters_and_inputs():
    module = nn.Linear(2, 1)
    given = {"x": torch.ones(1, 2, requires_grad=True)}
    module(given["x"]).sum().backward()
    found = state.gradients(module, state.tensors_of(given, "input"))
    assert sorted(found) == ["bias", "input['x']", "weight"]


def test_the_device_of_everything():
    assert state.devices_of(nn.Linear(2, 2), torch.ones(2)) == torch.device("cpu")
    assert state.devices_of(lambda: None, ()) == torch.device("cpu")


def test_tensors_on_two_devices_are_named():
    with pytest.raises(CompareError) as caught:
        state.devices_of(nn.Linear(2, 2), torch.ones(1, 2, device="meta"))
    assert str(caught.value) == (
        "The parameter weight is on 'cpu' and the input on 'meta'. "
        "A step cannot be timed across devices. Move model and inputs to one device."
    )


def test_a_mesh_for_another_device_is_named():
    with fake_group(world_size=2):
        mesh = init_device_mesh("meta", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        tensor._local_tensor = torch.ones(2)
        with pytest.raises(CompareError, match="DTensor on a mesh for 'meta', but its data is on"):
            state.devices_of(lambda x: x, {"x": tensor})
