"""FSDP2 and DDP modules as they are, in one graph: gathers, averages, guards, and what stays as
it was.
"""

import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only

pytestmark = pytest.mark.usefixtures("enabled")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four parameters a block; three of the root's own, one of them tied."""

    def __init__(self, between=None):
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(), Block(6)])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.between = between

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                self.between()
        return self.head(x)


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Graphs:
    """A backend that counts the collectives of forward and backward graphs, by name."""

    def __init__(self):
        self.counts = []

    def __call__(self, graph, inputs):
        def count(graph, inputs):
            found = {}
            for node in graph.graph.nodes:
                name = getattr(node.target, "_opname", "")
                if "_c10d_functional" in str(node.target) and name != "wait_tensor":
                    found[name] = found.get(name, 0) + 1
            self.counts.append(found)
            return graph

        compile = aot_autograd(
            fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
        )
        return compile(graph, inputs)


def compiled(model, **options):
    graphs = Graphs()
    return torch.compile(model, backend=graphs, **{"fullgraph": True, **options}), graphs


def snapshot(model):
    return (
        [type(each) for each in model.modules()],
        {name: (type(p), id(p)) for name, p in model.named_parameters()},
        {name: value.shape for name, value in model.state_dict().items()},
        [len(each._forward_hooks) for each in model.modules()],
    )


def test_a_model_is_one_graph_each_way_and_stays_what_it_was(mesh):
    model = sharded(Model(), mesh["tp"])
    model(torch.ones(2, 8))  # FSDP2 itself registers hooks of state dicts here
    model.reshard()
    before = snapshot(model)
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    # 2 x 4, and 2 of the root: the tied one once. Backward needs the weights of blocks again, not
    # biases.
    assert graphs.counts[0] == {"all_gather_into_tensor": 10}
    assert graphs.counts[1] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 10}
    assert snapshot(model) == before
    for param in model.parameters():
        assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements


def as_regions(model, monkeypatch):
    monkeypatch.setattr(Block, "forward", torch.compiler.nested_compile_region(Block.forward))
    return model


def test_blocks_that_are_regions_gather_and_reduce_as_others_do(mesh, monkeypatch):
    model = as_regions(sharded(Model(), mesh["tp"]), monkeypatch)
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[0] == {"all_gather_into_tensor": 10}
    assert graphs.counts[1] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 10}


def test_blocks_that_are_regions_are_averaged_as_others_are(mesh, monkeypatch):
    model = as_regions(DistributedDataParallel(Model()), monkeypatch)
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts == [{}, {"all_reduce": 1}]


def test_parameters_that_stay_gathered_are_not_gathered_again(mesh):
    model = sharded(Model(), mesh["tp"], reshard_after_forward=False)
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts == [{"all_gather_into_tensor": 10}, {"reduce_scatter_tensor": 10}]


def test_hybrid(mesh):
    model = sharded(Model(), mesh)
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[1]["all_reduce"] == graphs.counts[1]["reduce_scatter_tensor"] == 10


def test_inputs_and_outputs_have_the_dtypes_of_the_policy(mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    model = fully_shard(Block(), mesh=mesh["tp"], mp_policy=policy)
    function, _ = compiled(model)
    out = function(torch.ones(2, 8))
    assert out.dtype == torch.float64
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_parameter_sharded_on_its_second_dimension(mesh):
    model = fully_shard(
        nn.Linear(8, 8), mesh=mesh["tp"], shard_placement_fn=lambda p: Shard(p.ndim - 1)
    )
    function, _ = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert model.weight.grad.placements == (Shard(1),)


def test_function_calls_the_model_and_reads_its_parameters(mesh):
    model = sharded(Model(), mesh["tp"])

    def program(x):
        y = model(x)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        return y.sum() + model.blocks[0].up.weight.to_local().sum()

    compiled(program)[0](torch.ones(2, 8)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_was_read_of_the_state_is_guarded(mesh):
    model = sharded(Model(), mesh["tp"])
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    function(torch.ones(2, 8)).sum().backward()
    assert len(graphs.counts) == 2
    model.set_reshard_after_forward(False)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[3] == {"reduce_scatter_tensor": 10}
    model.set_gradient_divide_factor(1.0)
    function(torch.ones(2, 8)).sum().backward()
    assert len(graphs.counts) == 6
    grads = [param.grad for param in model.parameters()]
    model.set_requires_gradient_sync(False)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[6:] == [{"all_gather_into_tensor": 10}, {}]
    assert all(a is b.grad for a, b in zip(grads, model.parameters(), strict=True))


def test_eager_calls_between_compile_nothing_anew(mesh):
    model = sharded(Model(), mesh["tp"])
    function, graphs = compiled(model)
    for _ in range(2):
        function(torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 8))  # leaves the root gathered
        model.unshard(async_op=True)
    function(torch.ones(2, 8)).sum().backward()
    assert len(graphs.counts) == 2
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_a_break_inside_runs_the_whole_forward_in_eager_mode(mesh):
    model = sharded(Model(torch._dynamo.graph_break), mesh["tp"])
    function, graphs = compiled(model, fullgraph=False)
    function(torch.ones(2, 8)).sum().backward()
    assert all("all_gather_into_tensor" not in each for each in graphs.counts)
    assert len(graphs.counts) >= 2
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_compiled_block_under_an_eager_root_obeys_the_root(mesh):
    model, graphs = Model(), Graphs()
    for block in model.blocks:
        block.compile(backend=graphs)
    sharded(model, mesh["tp"])
    model(torch.ones(2, 8)).sum().backward()
    assert {} in graphs.counts and all(not each for each in graphs.counts)


def test_a_module_whose_compile_enables_the_plugin(mesh):
    """``backend="dynamo_dist"`` enables where it is looked up, and that is within
    ``Module.compile``.
    """
    model = sharded(Model(), mesh["tp"])
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    dynamo_dist.disable()
    model.compile(backend="dynamo_dist", fullgraph=True)
    assert dynamo_dist.is_enabled()
    with graph_passes_only(), torch.no_grad():
        model(torch.ones(2, 8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_group_of_modules_is_whole_until_all_have_run(mesh):
    model = Model()
    fully_shard(list(model.blocks), mesh=mesh["tp"])
    fully_shard(model, mesh=mesh["tp"])
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[0] == {"all_gather_into_tensor": 10}


def test_all_parameters_of_a_module_read_at_once(mesh):
    class Sum(nn.Linear):
        def forward(self, x):
            assert not any(isinstance(p, DTensor) for p in self.parameters())
            return super().forward(x) + sum(p.sum() for p in self.parameters())

    model = fully_shard(Sum(8, 8), mesh=mesh["tp"])
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[0] == {"all_gather_into_tensor": 2}


def test_forward_replaces_its_parameters_by_local_tensors(mesh):
    class Local(nn.Linear):
        def forward(self, x):
            before = dict(self.named_parameters(recurse=False))
            bias = self._parameters["bias"]
            self._parameters.update({"weight": before["weight"].to_local(), "bias": None})
            try:
                assert self.bias is None and not isinstance(self.weight, DTensor)
                return super().forward(x)
            finally:
                self._parameters.update({"weight": before["weight"], "bias": bias})

    model = parallelize_module(nn.Sequential(Local(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    rows = model[0].weight.to_local().shape[0]
    model[0]._forward_pre_hooks.clear()
    model[0]._forward_hooks.clear()
    fully_shard(model, mesh=mesh["dp"])
    function, _ = compiled(model)
    out = function(torch.ones(2, 8))
    assert out.shape == (2, rows)
    out.sum().backward()
    assert model[0].weight.grad.placements == model[0].weight.placements
    assert model[0].bias.grad is None


def test_a_hook_behind_the_gradient_of_a_whole_parameter(mesh):
    hooked = {}

    class Hooked(nn.Linear):
        def forward(self, x):
            weight = self.weight
            if hooked.get("weight") is not weight:
                weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
                hooked["weight"] = weight
            return super().forward(x)

    model = fully_shard(Hooked(8, 8), mesh=mesh["tp"])
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts[1]["all_reduce"] == 1
    assert hooked == {}  # a whole parameter does not outlive the call
    function(torch.ones(2, 8))
    assert len(graphs.counts) == 2


def test_parameters_on_meta_are_refused_as_in_eager_mode(mesh):
    with torch.device("meta"):
        model = Block()
    fully_shard(model, mesh=mesh["tp"])
    with pytest.raises(Exception, match="materialized from meta device"):
        compiled(model)[0](torch.ones(2, 8))


def test_ddp_averages_in_one_launch_a_bucket(mesh):
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.0005)  # 524 bytes of 1304
    function, graphs = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts == [{}, {"all_reduce": 2}]


def test_ddp_within_no_sync_averages_nothing(mesh):
    model = DistributedDataParallel(Model())
    function, graphs = compiled(model)
    with model.no_sync():
        function(torch.ones(2, 8)).sum().backward()
    function(torch.ones(2, 8)).sum().backward()
    assert graphs.counts == [{}, {}, {}, {"all_reduce": 1}]


def test_ddp_follows_parameters_to_new_storage(mesh):
    model = DistributedDataParallel(nn.Linear(8, 8))
    function, graphs = compiled(model)
    x = torch.ones(2, 8)
    for value in (1.0, 2.0):
        for param in model.parameters():
            param.data = torch.full_like(param, value)
        assert function(x).unique().tolist() == [9 * value]
        function(x).sum().backward()
    assert len(graphs.counts) == 2
    model.module.weight = nn.Parameter(torch.zeros(8, 8))
    with torch.no_grad():
        assert function(x).unique().tolist() == [2.0]


def test_fewer_rows_than_ranks(mesh):
    model = fully_shard(nn.Linear(8, 1), mesh=mesh["tp"])
    function, _ = compiled(model)
    function(torch.ones(2, 8)).sum().backward()
    assert model.weight.grad.shape == (1, 8)


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_root_stays_unsharded_until_backward(mesh, in_checkpoint):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.head, x, use_reentrant=False) if in_checkpoint else self.head(x)

    model = fully_shard(Root(), mesh=mesh["tp"])
    shard = model.head.weight
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 8)).sum()
    assert not isinstance(model.head.weight, DTensor)
    assert model.state_dict()["head.weight"].shape == model.head.weight.shape == (8, 8)
    out.backward()
    assert model.head.weight is shard
    assert shard.grad is not None


class Parts(nn.Module):
    """The loss of a part of the rows at a time, each in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return sum(checkpoint(self.loss, rows, use_reentrant=False) for rows in x.chunk(3))

    def loss(self, rows):
        return self.head(rows).exp().sum()


@pytest.mark.parametrize("again", [False, True])
def test_a_parameter_is_gathered_once_for_all_checkpoints_of_a_forward(mesh, again):
    model = fully_shard(Parts(), mesh=mesh["tp"], reshard_after_forward=again)
    function, graphs = compiled(model)
    function(torch.ones(6, 8)).backward()
    gathers = {"all_gather_into_tensor": 1}
    assert graphs.counts[0] == gathers
    assert graphs.counts[1] == {"reduce_scatter_tensor": 1, **(gathers if again else {})}
