"""``fully_shard`` with its options, beside itself in eager mode."""

import copy

import nets
import torch
import torch.distributed as dist
from beside_eager import MIXED, adamw, batch, compiled, grid, line, program, sgd, train, weights
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def on_shards(params):
    """Train shards alone: what no wrapper holds each rank would train by itself."""
    return sgd([p for p in params if isinstance(p, DTensor)])


def sharded(**options):
    """The blocks of a model, then the model; on all ranks where no mesh is given."""

    def wrap(model):
        for block in model.blocks:
            fully_shard(block, **{"mesh": line(), **options})
        return fully_shard(model, **{"mesh": line(), **options})

    return wrap


@program(4)
def resharded():
    train(sharded(), optimizer=adamw)


@program(2)
def kept():
    train(sharded(reshard_after_forward=False), mixed=MIXED, unequal=True)


@program(4, sweep=True)
def resharded_to_pairs():
    train(sharded(reshard_after_forward=2), dtype=torch.float64, mixed=MIXED)


@program(2)
def summed_in_float32():
    # Rounded to bfloat16 at other places: eight bits of the greatest value.
    train(
        sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        tolerance=2e-2,
    )


@program(2, sweep=True)
def gathered_in_float64():
    inside = MixedPrecisionPolicy(torch.float64, torch.float64)
    outside = MixedPrecisionPolicy(torch.float64, torch.float64, torch.float32)

    def wrap(model):
        fully_shard(model.blocks[0], mesh=line(), mp_policy=inside)
        return fully_shard(model, mesh=line(), mp_policy=outside)

    train(wrap, unequal=True, mixed=MIXED)


@program(2, sweep=True)
def inputs_are_not_cast():
    policy = MixedPrecisionPolicy(torch.float64, cast_forward_inputs=False)

    def step(side, x, i):
        side.optimizer.zero_grad()
        loss = side.call(x.double()).square().mean()
        loss.backward()
        side.optimizer.step()
        return loss

    train(lambda model: fully_shard(model, mesh=line(), mp_policy=policy), step=step)


@program(4)
def hybrid():
    train(sharded(mesh=grid()), unequal=True, mixed=MIXED)


@program(4, sweep=True)
def hybrid_summed_in_float64():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    train(
        sharded(mesh=grid(), mp_policy=policy, reshard_after_forward=False),
        optimizer=adamw,
    )


def tensor_parallel(plan):
    def wrap(model):
        mesh = grid()
        for block in model.blocks:
            parallelize_module(block, mesh["inner"], plan)
        return sharded(mesh=mesh["outer"])(model)

    return wrap


@program(4)
def tensor_parallel_inside():
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    train(tensor_parallel(plan), data_rank=grid()["outer"].get_local_rank(), mixed=MIXED)


class NormedBlock(nets.Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(nets.WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


@program(4, sweep=True)
def sequence_parallel_inside():
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }

    class Gathered(NormedBlock):
        def forward(self, x):
            return super().forward(x).full_tensor()

    train(
        tensor_parallel(plan),
        lambda: nets.Net(Gathered),
        data_rank=grid()["outer"].get_local_rank(),
        optimizer=adamw,
    )


@program(2, sweep=True)
def sharded_on_the_last_dimension():
    train(sharded(shard_placement_fn=lambda p: Shard(p.ndim - 1)), unequal=True, mixed=MIXED)


@program(4, sweep=True)
def parameters_on_two_meshes():
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    def wrap(model):
        pairs = HSDPMeshInfo(grid(), shard_mesh_dim=1, replicate_mesh_dim=0)
        everywhere = FSDPMeshInfo(line(), shard_mesh_dim=0)

        def placement(param):
            return ShardPlacementResult(Shard(0), pairs if param.ndim == 1 else everywhere)

        return sharded(shard_placement_fn=placement)(model)

    train(wrap, mixed=MIXED)


class Tied(nets.Net):
    def __init__(self):
        super().__init__(out=nets.WIDTH)
        self.embed = nn.Linear(nets.WIDTH, nets.WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return super().forward(self.embed(x))


@program(2)
def tied():
    train(sharded(), Tied, unequal=True, mixed=MIXED)


@program(2, sweep=True)
def one_linear_in_two_blocks():
    class Shared(nets.Net):
        def __init__(self):
            super().__init__(blocks=2)
            self.blocks[1].up = self.blocks[0].up

    # The shared one belongs to the root: it is whole for both blocks.
    def wrap(model):
        return fully_shard(model, mesh=line())

    train(wrap, Shared, optimizer=adamw)


@program(2)
def frozen():
    def net():
        model = nets.Net()
        model.blocks[0].up.weight.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    def only_trained(params):
        return sgd([p for p in params if p.requires_grad])

    train(sharded(), net, optimizer=only_trained, mixed=MIXED)


@program(4)
def uneven_rows_and_empty_shards():
    sides = train(sharded(), nets.uneven, mixed=MIXED, unequal=True)
    empty = [p for p in sides[1].model.parameters() if p.to_local().numel() == 0]
    assert bool(empty) == (dist.get_rank() == 3)


@program(2, sweep=True)
def groups_of_an_optimizer():
    def two_groups(params):
        params = list(params)
        return torch.optim.AdamW(
            [{"params": params[:1], "lr": 1e-3}, {"params": params[1:], "weight_decay": 0.3}]
        )

    train(sharded(), optimizer=two_groups, unequal=True)


@program(2, sweep=True)
def ignored():
    def wrap(model):
        own = model.head.weight
        for block in model.blocks:
            fully_shard(block, mesh=line())
        model = fully_shard(model, mesh=line(), ignored_params={own})
        assert not isinstance(model.head.weight, DTensor)
        return model

    train(wrap, optimizer=on_shards)


@program(2, sweep=True)
def a_list_of_modules_in_one_group():
    def wrap(model):
        fully_shard(list(model.blocks), mesh=line())
        return fully_shard(model, mesh=line())

    train(wrap, lambda: nets.Net(blocks=2), dtype=torch.float64, mixed=MIXED)


@program(2, sweep=True)
def blocks_without_a_root():
    def wrap(model):
        for block in model.blocks:
            fully_shard(block, mesh=line())
        return model

    train(wrap, lambda: nets.Net(blocks=2), optimizer=on_shards)


@program(2, sweep=True)
def gradients_divided_by_three():
    def wrap(model):
        model = sharded()(model)
        for each in model.modules():
            if hasattr(each, "set_gradient_divide_factor"):
                each.set_gradient_divide_factor(3.0)
                each.set_force_sum_reduction_for_comms(True)  # gloo lacks PREMUL_SUM
        return model

    train(wrap, mixed=MIXED)


@program(2, sweep=True)
def prefetched():
    def wrap(model):
        model = sharded()(model)
        first, second = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        return model

    train(wrap, lambda: nets.Net(blocks=2), mixed=MIXED, dtype=torch.float64)


@program(2, sweep=True)
def settled_on_meta():
    """A model that is made on ``meta``, sharded, and then filled."""

    def wrap(model):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        model = sharded()(model.to("meta"))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
        return model

    train(wrap, unequal=True)


@program(2)
def compiled_before_it_is_sharded():
    """As accelerate does it: compiled first, and the compiled module is what is sharded last."""
    torch.manual_seed(1)
    base = nets.Net(blocks=2)

    def trained(prepare):
        model = copy.deepcopy(base)
        blocks = list(model.blocks)
        model = prepare(model)
        for block in blocks:
            fully_shard(block, mesh=line())
        fully_shard(model, mesh=line())
        optimizer = sgd(model.parameters())
        losses = []
        for step in range(4):
            losses.append(model(batch(step)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *weights(model)]

    expected = trained(lambda model: model)
    torch.testing.assert_close(trained(compiled), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
