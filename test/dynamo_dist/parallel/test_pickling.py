"""Whole modules, pickled and loaded again: of the same class, with the same numbers and gradients."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.testing import fake_group_fills_results, fake_mesh

X = torch.arange(32.0).view(4, 8)


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written():
    """As some collectives of fake groups leave it; else whatever was in memory."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Gated(nn.Module):
    """With a state and a way of pickling of its own."""

    def __init__(self):
        super().__init__()
        self.gate, self.kept = nn.Parameter(torch.ones(8)), "kept"

    def forward(self, x):
        return x * self.gate

    def __getstate__(self):
        return {**self.__dict__, "kept": "changed"}

    def __reduce__(self):
        return (Gated, (), self.__getstate__())


def layers():
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8), Gated())


def data_parallel(mesh, **options):
    return dynamo_dist.data_parallel(layers(), mesh, **options)


def in_halves(mesh):
    return data_parallel(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def traced(mesh):
    return dynamo_dist.data_parallel(torch.fx.symbolic_trace(layers()), mesh)


def localized(mesh):
    module = layers()
    for part in module.modules():
        # Of a norm with sharded weights torch has no gradient up to 2.12.
        placement = Replicate() if isinstance(part, nn.LayerNorm) else Shard(0)
        for name, param in list(part._parameters.items()):
            placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
            part._parameters[name] = nn.Parameter(placed)
    return dynamo_dist.localize(module)


def through_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def step(module, mesh, make):
    x = X.clone()
    if make is localized:
        x = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
    found = module(x)
    found = found.to_local() if isinstance(found, DTensor) else found
    found.float().pow(2).sum().backward()
    gradients = [param.grad for param in module.parameters()]
    module.zero_grad()
    return [found, *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


WAYS = [through_torch, through_pickle, copy.deepcopy]
CASES = [(make, way) for make in (data_parallel, in_halves, localized) for way in WAYS]


@pytest.mark.parametrize(("make", "way"), [*CASES, (traced, through_torch)])
def test_what_is_loaded_is_what_was_saved(make, way):
    with fake_mesh(4) as mesh:
        module = make(mesh)
        expected = step(module, mesh, make)
        found = way(module)
        torch.testing.assert_close(
            step(found, mesh, make),
            expected,
            rtol=0,
            atol=0,
            equal_nan=not fake_group_fills_results(),
        )
        if make is not traced:  # a graph module forgets the name of the class it was traced from
            names = [[type(part).__name__ for part in m.modules()] for m in (found, module)]
            assert names[0] == names[1]
        assert found.state_dict().keys() == module.state_dict().keys()


def test_a_copy_in_this_process_is_of_the_same_class():
    """So that one compiled function serves both."""
    with fake_mesh(4) as mesh:
        for make in (data_parallel, localized):
            module = make(mesh)
            for way in (copy.deepcopy, copy.copy):
                assert type(way(module)[0]) is type(module[0])
