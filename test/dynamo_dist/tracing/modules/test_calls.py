"""The hooks of a compiled module stand in its graph; the states that FSDP2 keeps recompile
nothing.
"""

import functools

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


def wrapped(model, compile):
    return compile(model)


def in_place(model, compile):
    model.compile(**compile.keywords)
    return model


@pytest.mark.parametrize("how", [wrapped, in_place])
def test_a_model_that_is_sharded_after_its_compile_is_one_graph(how):
    """As accelerate does it: blocks, a list of modules, and last what ``torch.compile`` has
    returned.
    """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with fake_mesh(4) as mesh:
        model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 4))
        compiled = how(model, functools.partial(torch.compile, backend=backend, fullgraph=True))
        for block in model[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard([*model[2:]], mesh=mesh, reshard_after_forward=False)
        fully_shard(compiled, mesh=mesh)
        for _ in range(2):
            compiled(torch.ones(2, 8)).sum().backward()
    assert len(graphs) == 1


def test_blocks_compiled_before_sharding_stay_compiled():
    with fake_mesh(4) as mesh:
        model = nn.Sequential(Block(), Block())
        for block in model:
            block.compile(backend="eager", fullgraph=True)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


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
