"""The hooks of a compiled module stand in its graph; the states that FSDP2 keeps recompile nothing."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, result: result + 1)
    return model


def test_hooks_and_forward_are_one_graph(compiled):
    model, x = hooked(), torch.ones(2, 4)
    function, graphs = compiled(model)
    torch.testing.assert_close(function(x), model(x))
    assert len(graphs) == 1


def test_each_module_has_a_compile_cache_of_its_own(compiled):
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 1):
        function, graphs = compiled(hooked())
        function(torch.ones(2, 4))
        assert len(graphs) == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x)


def test_hooks_of_fsdp_stay_outside(compiled):
    with fake_mesh(4) as mesh:
        model = fully_shard(Block(), mesh=mesh)
        function, graphs = compiled(model)
        function(torch.ones(2, 8)).sum().backward()
    assert len(graphs) == 1


def test_modules_that_are_sharded_later_recompile_nothing(compiled):
    with fake_mesh(4) as mesh:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)

        def program(x):
            model.set_requires_gradient_sync(False)
            return x + 1

        function, graphs = compiled(program)
        function(torch.ones(2))
        fully_shard(nn.Linear(8, 8), mesh=mesh)
        function(torch.ones(2))
    assert len(graphs) == 1
    states = model._get_fsdp_state()
    assert states._fsdp_param_group.reduce_grads is False
