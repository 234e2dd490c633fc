"""Which replicas have to draw alike, and what is said where they do not."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.errors import RanksDifferError
from dynamo_dist.job.agreement import GroupStates
from dynamo_dist.trace.randomness import replicas
from inductor_passes.agree.graph import Frame

number = itertools.count()
pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def compared(monkeypatch):
    """What is given to the comparison between ranks."""
    found = []
    monkeypatch.setattr(replicas, "_compared", set())
    monkeypatch.setattr(replicas, "check_agreement", lambda *given: found.append(given[:3]))
    return found


def traced(function, mesh, *placements):
    replicas.forget()
    x = DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)
    torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    replicas.check(5.0, Frame(root=f"function {next(number)}"))


def test_groups_of_replicas(mesh, compared):
    traced(lambda x: F.dropout(x, 0.5), mesh, Shard(0), Replicate())
    ((what, states, deadline),) = compared
    assert list(states) == [mesh.get_group("tp").group_name] and deadline == 5.0
    assert what.startswith("draws of") and states.popitem()[1][0].startswith("cpu ")


def test_shards_may_draw_differently(mesh, compared):
    traced(lambda x: F.dropout(x, 0.5), mesh, Shard(0), Shard(1))
    assert compared == []


def test_nothing_is_drawn(mesh, compared):
    traced(lambda x: x.sin(), mesh, Replicate(), Replicate())
    assert compared == []


def test_a_draw_in_eager_is_nobodys_graph(mesh, compared):
    replicas.forget()
    F.dropout(DTensor.from_local(torch.ones(4), mesh, [Replicate(), Replicate()]), 0.5)
    replicas.check(5.0, Frame())
    assert compared == []


def test_the_state_that_is_compared(mesh, compared):
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        torch.compiler.reset()
        traced(torch.rand_like, mesh, Shard(0), Replicate())
    first, same, other = (states for _, states, _ in compared)
    assert first == same != other


def test_a_function_is_compared_once_and_a_part_of_it_never(mesh, compared, monkeypatch):
    excused = []
    monkeypatch.setattr(replicas, "excuse", lambda *given: excused.append(given))
    mesh_dim = (mesh, 1)
    for frame in (Frame(root="f"), Frame(root="f"), Frame(partial=True, root="g")):
        replicas._drawn.add(mesh_dim)
        replicas.check(5.0, frame)
    assert [what for what, *_ in compared] == ["draws of f"]
    assert [what for what, *_ in excused] == ["draws of g"]


def test_what_is_said():
    group = GroupStates("tp", (0, 1), ("cpu aaa",))
    error = replicas._different("draws of 0/0", group, 0, ["cpu bbb"], 1)
    assert isinstance(error, RanksDifferError)
    assert "Ranks 0 and 1 hold replicas on group 'tp'" in str(error)
    assert "torch.manual_seed" in str(error)
