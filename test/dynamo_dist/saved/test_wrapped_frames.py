"""Frames of what FSDP2 and DDP wrap: their states are found again, and hold what the trace has read, or the frame is traced."""

import pytest
import torch
from frame_calls import backend, call, load
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist import versions
from dynamo_dist.saved import frames
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat.dynamo import frame_pickles
from dynamo_dist.torch_compat.inductor import keys
from dynamo_dist.trace.modules import one_way, whole_parameters

TORCH = versions.parse(torch.__version__)
pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.skipif(
        TORCH < (2, 12), reason="torch 2.11 guards these frames in forms of its own"
    ),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def sharded(mesh, policy=None, **options):
    net = nn.Sequential(Block(), Block())
    policy = policy or MixedPrecisionPolicy()
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    return fully_shard(net, mesh=mesh, mp_policy=policy, **options)


def averaged(mesh):
    return DistributedDataParallel(nn.Sequential(Block(), Block()), process_group=mesh.get_group())


def replicated(mesh):
    return replicate(nn.Sequential(Block(), Block()), device_mesh=mesh)


def in_parallel_too(mesh):
    """Gathers of DTensors, each with the mesh of the tensor parallel ranks, which is an input of the graph."""
    net = nn.Sequential(Block(), Block())
    for block in net:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh._get_root_mesh()["tp"], plan)
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


WRAPPERS = [sharded, averaged, replicated, in_parallel_too]


@pytest.fixture
def ranks():
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        yield mesh["dp"]


@pytest.fixture
def asked(monkeypatch):
    """Votes of this rank; ``asked.says`` is what all ranks said."""

    class Asked(list):
        says = True

    found = Asked()

    def all_can(name, ranks, can, seconds):
        found.append((name, tuple(ranks), can))
        return can and found.says

    monkeypatch.setattr(one_way, "all_can", all_can)
    monkeypatch.setattr(one_way, "_alike", type(one_way._alike)())
    return found


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_another_models_frame_is_not_traced_again_and_trains(traced, ranks, asked, wrap):
    call(wrap(ranks), torch.ones(2, 4))
    assert len(traced) == 1 and [kept.because for kept in load()] == [""]
    votes = list(asked)
    one_way._alike.clear()
    net = wrap(ranks)
    call(net, torch.ones(2, 4)).sum().backward()
    assert len(traced) == 1 and len(frames.kept()) == 1
    assert all(param.grad is not None for param in net.parameters())
    # It votes as a rank does that traces.
    assert asked == votes * 2 and all(can for *_, can in asked)


def test_sources_are_the_same_in_cache_keys(traced, ranks, asked):
    """An input's source is in AOTAutograd's key, where the address in the name of a global is a number."""
    call(in_parallel_too(ranks), torch.ones(2, 4))
    [kept] = load()
    frame = frame_pickles.loads(kept.body, {"__builtins__": {}})
    names = list(frame.reached)
    assert len(names) > 8 and all(keys._OWN_GLOBAL.fullmatch(name) for name in names)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_rank_that_loads_runs_it_eagerly_where_another_one_breaks(
    traced, ranks, asked, wrap, caplog
):
    call(wrap(ranks), torch.ones(2, 4))
    load()
    asked.says = False
    torch._dynamo.reset()
    one_way._alike.clear()  # as in another process
    net = wrap(ranks)
    torch.compile(net, backend=backend)(torch.ones(2, 4))
    assert len(traced) > 1 and whole_parameters.BROKEN in caplog.text
    assert sum(can for *_, can in asked) == len(asked) == 2


def one_group(mesh):
    return fully_shard(nn.Sequential(Block(), Block()), mesh=mesh)


def outputs_in_float64(mesh):
    net = nn.Sequential(Block(), Block())
    for block in net:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))


def columns(mesh):
    return sharded(mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))


@pytest.mark.parametrize(
    "other",
    [
        one_group,
        columns,
        lambda mesh: sharded(mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        outputs_in_float64,
        lambda mesh: sharded(mesh, reshard_after_forward=False),
        lambda mesh: nn.Sequential(Block(), Block()),
    ],
    ids=["one group", "columns", "gathered in bfloat16", "output", "kept", "not sharded"],
)
def test_what_is_sharded_otherwise_is_traced(traced, ranks, asked, other):
    call(sharded(ranks), torch.ones(2, 4))
    load()
    call(other(ranks), torch.ones(2, 4))
    assert len(traced) == 2


def test_a_setting_of_the_state_is_compared_and_guarded(traced, ranks, asked, caplog):
    call(sharded(ranks), torch.ones(2, 4))
    saved = dict(one_way._alike)
    load()
    net = sharded(ranks)
    net[0].set_gradient_divide_factor(4.0)
    call(net, torch.ones(2, 4))
    assert len(traced) == 2 and "is another one" in caplog.text
    load()
    torch._dynamo.reset()
    one_way._alike.clear()  # names are those of the process before, in which it was the second
    one_way._alike.update(saved)
    net = sharded(ranks)
    net[0].set_gradient_divide_factor(4.0)
    compiled = torch.compile(net, backend=backend)
    compiled(torch.ones(2, 4))
    assert len(traced) == 2
    net[0].set_gradient_divide_factor(8.0)
    compiled(torch.ones(2, 4))
    assert len(traced) == 3


def test_nothing_stays_in_the_globals_of_a_frame_that_cannot_be_run(
    traced, ranks, asked, monkeypatch
):
    call(sharded(ranks), torch.ones(2, 4))
    load()
    from dynamo_dist.trace.modules import calls

    torch._dynamo.reset()
    before = set(vars(calls))
    monkeypatch.setattr(frames, "_compare", fail)
    net = sharded(ranks)
    torch.compile(net, backend=backend)(torch.ones(2, 4))
    assert len(traced) == 2
    torch._dynamo.reset()
    assert not {name for name in set(vars(calls)) - before if "dynamo_dist" in name}


def fail(*_):
    raise frames.CannotKeep("a planted difference")
