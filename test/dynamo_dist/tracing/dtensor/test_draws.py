"""Draws of DTensors on the CPU, compiled: the numbers that eager mode draws, which are torch's
own.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from dynamo_dist.errors import StrategyError

pytestmark = pytest.mark.usefixtures("enabled")


def dropped(x):
    return F.dropout(x, 0.5).sin()


PROGRAMS = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 10, 1000),
    "dropout": dropped,
    "checkpointed": lambda x: checkpoint(dropped, x, use_reentrant=False),
    "twice": lambda x: torch.rand_like(x) - torch.rand_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.detach()),
    "uniform": lambda x: torch.empty_like(x).uniform_(to=2.0),
    "normal": lambda x: torch.empty_like(x).normal_(1.0),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
}
LAYOUTS = {"shards": [Shard(0), Shard(1)], "replicas": [Replicate(), Replicate()]}


def on_a_rank(function, placements, backend=None, rank=2):
    """Local result, local gradient and the generator's state afterwards; rows and columns are
    uneven.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        torch._dynamo.reset()
        _clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.full((9, 7), 0.5), mesh, placements, src_data_rank=None)
        x.requires_grad_()
        torch.manual_seed(3)
        y = (torch.compile(function, backend=backend, fullgraph=True) if backend else function)(x)
        if y.requires_grad:
            y.to_local().sum().backward()
        grad = None if x.grad is None else x.grad.to_local()
        return y.to_local().detach(), grad, torch.get_rng_state()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_draws_what_python_draws(name, layout):
    there = on_a_rank(PROGRAMS[name], LAYOUTS[layout], backend="aot_eager")
    here = on_a_rank(PROGRAMS[name], LAYOUTS[layout])
    dynamo_dist.disable()
    upstream = on_a_rank(PROGRAMS[name], LAYOUTS[layout])
    torch.testing.assert_close(there, here, rtol=0, atol=0)
    torch.testing.assert_close(here, upstream, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_has_no_strategy_is_refused(backend):
    with pytest.raises(Exception, match=r"poisson.default draws random numbers and cannot run on"):
        on_a_rank(lambda x: torch.poisson(x.detach()), LAYOUTS["shards"], backend)


def test_an_operator_of_others_in_place_is_refused():
    @torch.library.custom_op(
        "dynamo_dist_test::noise_", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,)
    )
    def noise_(x: torch.Tensor) -> None:
        x.uniform_()

    with pytest.raises(StrategyError, match=r"noise_.default draws random numbers"):
        on_a_rank(lambda x: noise_(x.detach()), LAYOUTS["shards"])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_factories_on_the_cpu(backend):
    def made(x):
        layout = {"device_mesh": x.device_mesh, "placements": x.placements}
        return dtensor.randn(9, 7, **layout) * dtensor.rand(9, 7, **layout)

    y, _, state = on_a_rank(made, LAYOUTS["replicas"], backend)
    torch.manual_seed(3)
    assert torch.equal(y, torch.randn(9, 7) * torch.rand(9, 7))
    assert torch.equal(state, torch.get_rng_state())
