"""Draws on the CPU on each rank of 2x2: shards differ, replicas and generators agree, compiled as in eager mode."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import replace_random
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from dynamo_dist.errors import StrategyError
from dynamo_dist.trace.randomness.shards import position

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("enabled")
WORLD = 4
# Layouts on 2x2, and how many different shards each has.
LAYOUTS = {
    "rows and columns": ([Shard(0), Shard(1)], 4),
    "rows twice": ([Shard(0), Shard(0)], 4),
    "columns of replicas": ([Replicate(), Shard(1)], 2),
    "rows, replicas": ([Shard(0), Replicate()], 2),
    "replicas": ([Replicate(), Replicate()], 1),
}


def dropped(x):
    return F.dropout(x, 0.5).sin()


COMPILED = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randint_like from": lambda x: torch.randint_like(x, 10, 1000),
    "dropout": dropped,
    "checkpointed": lambda x: checkpoint(dropped, x, use_reentrant=False),
    "twice": lambda x: torch.rand_like(x) - torch.rand_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.detach()),
    "bernoulli of one": lambda x: torch.bernoulli(x.detach(), 0.5),
    "bernoulli of each": lambda x: torch.empty_like(x).bernoulli_(x.detach()),
    "uniform": lambda x: torch.empty_like(x).uniform_(to=2.0),
    "normal": lambda x: torch.empty_like(x).normal_(1.0),
    "normal around": lambda x: torch.normal(x.detach(), 2.0),
    "normal as wide": lambda x: torch.normal(2.0, x.detach()),
    "normal of both": lambda x: torch.normal(x.detach(), x.detach()),
    "normal, one width for all": lambda x: torch.normal(x.detach(), x.detach().sum() * 0 + 1),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.01),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "poisson": lambda x: torch.poisson(x.detach() * 1000),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 1000), x.detach()),
    "gamma": lambda x: torch._standard_gamma(x.detach()),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
}
EAGER = {
    **COMPILED,
    "random": lambda x: torch.empty_like(x).random_(),
    "random to": lambda x: torch.empty_like(x).random_(1000),
    "random from": lambda x: torch.empty_like(x).random_(10, 1000),
    "a generator": lambda x: torch.empty_like(x).uniform_(generator=torch.Generator()),
}


def on_each_rank(function, placements, shape=(9, 7), backend=None, ranks=range(WORLD)):
    """Local result, local gradient and the generator's state afterwards, by rank; rows and columns are uneven."""
    found = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            torch._dynamo.reset()
            _clear_sharding_prop_cache()
            mesh = init_device_mesh("cpu", (2, 2))
            x = distribute_tensor(torch.full(shape, 0.5), mesh, placements, src_data_rank=None)
            x.requires_grad_()
            torch.manual_seed(3)
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            y = compiled(x) if backend else function(x)
            if y.requires_grad:
                y.to_local().sum().backward()
            grad = None if x.grad is None else x.grad.to_local()
            found.append((y.to_local().detach(), grad, torch.get_rng_state()))
        finally:
            dist.destroy_process_group()
    return found


def different(found):
    return len({tuple(y.flatten().tolist()) for y, *_ in found})


OF_ALL = ("rows and columns", "replicas")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in EAGER for layout in OF_ALL),
        *(
            (name, layout)
            for name in ("uniform", "poisson")
            for layout in LAYOUTS
            if layout not in OF_ALL
        ),
    ],
)
def test_shards_differ_and_replicas_agree(name, layout):
    placements, shards = LAYOUTS[layout]
    found = on_each_rank(EAGER[name], placements)
    assert different(found) == shards
    assert all(torch.equal(state, found[0][2]) for *_, state in found)
    if shards == 1:
        torch.manual_seed(3)
        assert torch.equal(found[0][0], EAGER[name](torch.full((9, 7), 0.5)))


@pytest.mark.parametrize("name", COMPILED)
def test_a_graph_draws_what_python_draws(name):
    placements = [Shard(0), Shard(1)]
    here = on_each_rank(COMPILED[name], placements, ranks=[2])
    there = on_each_rank(COMPILED[name], placements, backend="aot_eager", ranks=[2])
    torch.testing.assert_close(there, here, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [9, 1, 0])
def test_rows_are_drawn_by_the_ranks_that_hold_them(rows):
    def program(x):
        return torch.multinomial(x.detach(), 4)

    found = on_each_rank(program, [Shard(0), Replicate()], (rows, 7))
    assert [y.shape[0] for y, *_ in found] == [(rows + 1) // 2] * 2 + [rows // 2] * 2
    assert all(torch.equal(state, found[0][2]) for *_, state in found)
    assert different(found) == (2 if rows else 1)


def test_a_row_in_parts_is_drawn_on_all_of_them(mesh):
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    assert torch.multinomial(x, 1).placements == (Shard(0), Replicate())


def drawn_by_inductor(function, placements, ranks):
    """What Inductor's decompositions and its pass for draws leave of a program on each rank."""
    graphs = []

    def show(graph, inputs):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            replace_random.replace_random_passes(graph)
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=show, decompositions=select_decomp_table())
    on_each_rank(function, placements, backend=backend, ranks=ranks)
    return graphs


@pytest.mark.parametrize(
    "name",
    "rand_like randn_like randint_like bernoulli exponential geometric cauchy log_normal".split(),
)
def test_inductor_draws_by_its_seeds_and_the_shard(name):
    def program(x):
        return COMPILED[name](x.detach())

    positions = []
    for graph in drawn_by_inductor(program, [Shard(0), Shard(1)], [1, 2]):
        targets = [str(node.target) for node in graph.nodes]
        assert not any("dynamo_dist_random" in each for each in targets)
        seed = next(node for node in graph.nodes if "inductor_seed" in str(node.target))
        (looked_up,) = seed.users
        (moved,) = looked_up.users
        positions.append(moved.args[1])
    assert positions == [1, 2]


def test_inductor_is_left_to_its_own_draws_of_replicas():
    for graph in drawn_by_inductor(torch.rand_like, [Replicate(), Replicate()], [1]):
        seed = next(node for node in graph.nodes if "lookup_seed" in str(node.target))
        assert all("inductor_random" in str(user.target) for user in seed.users)


def test_factories():
    def made(x):
        layout = {"device_mesh": x.device_mesh, "placements": x.placements}
        return dtensor.randn(9, 7, **layout) * dtensor.rand(9, 7, **layout)

    assert different(on_each_rank(made, [Shard(0), Replicate()])) == 2
    (y, _, state), *_ = on_each_rank(made, [Replicate(), Replicate()])
    torch.manual_seed(3)
    assert torch.equal(y, torch.randn(9, 7) * torch.rand(9, 7))
    assert torch.equal(state, torch.get_rng_state())


def test_shards_beside_a_pending_sum():
    def program(x):
        local, layout = x.to_local(), [Partial(), Shard(0)]
        pending = dtensor.DTensor.from_local(local, x.device_mesh, layout, run_check=False)
        return torch.bernoulli(pending)

    # What pends is finished first, in shards.
    assert different(on_each_rank(program, [Replicate(), Shard(0)], (64, 64))) == 4


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_outside_of_the_mesh(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        x = distribute_tensor(torch.full((4, 4), 0.5), mesh, [Shard(0)], src_data_rank=None)
        for draw in (torch.rand_like, torch.poisson, lambda x: torch.multinomial(x, 1)):
            assert draw(x).placements == (Shard(0),)
        assert x.exponential_() is x
        assert position(mesh, x.placements) == (rank if rank < 2 else None)
    finally:
        dist.destroy_process_group()


def test_an_operator_of_others_draws_by_shards():
    @torch.library.custom_op(
        "dynamo_dist_test::noise_",
        mutates_args=("x",),
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    def noise_(x: torch.Tensor) -> None:
        x.uniform_()

    def program(x):
        y = torch.zeros_like(x)
        noise_(y)
        return y

    assert different(on_each_rank(program, [Shard(0), Shard(1)])) == 4


def test_strides_follow_the_argument(mesh):
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Replicate()], src_data_rank=None)
    assert torch.poisson(x.t()).stride() == torch.poisson(torch.ones(4, 6).t()).stride()
    assert torch.multinomial(x, 3).stride() == (3, 1)


def test_numbers_for_a_pending_sum_are_refused(mesh):
    x = dtensor.DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(StrategyError, match="In a pending sum each rank would draw its own"):
        x.exponential_()
    assert torch.poisson(x).placements == (Replicate(), Replicate())


def test_noise_in_another_layout_is_refused(mesh):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    noise = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()] * 2, src_data_rank=None)
    with pytest.raises(StrategyError, match="reach a copy in another layout"):
        torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)


def test_an_error_leaves_the_generator_as_after_a_draw(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="rate"):
        torch.poisson(-x)
    assert torch.equal(after, torch.get_rng_state())


def test_whatever_torch_has_called_before():
    """Its C++ keeps what it has called once, stock's or ours: neither may go on with the other's."""

    def program(x):
        x.sum().sqrt()  # of a pending sum: torch finishes it in Python
        return torch.empty_like(x).uniform_()

    placements = [Shard(0), Shard(1)]
    for _ in range(2):
        dynamo_dist.disable()
        assert different(on_each_rank(program, placements, (8, 8))) == 1
        dynamo_dist.enable()
        found = on_each_rank(program, placements)
        assert different(found) == 4
        assert all(torch.equal(state, found[0][2]) for *_, state in found)
