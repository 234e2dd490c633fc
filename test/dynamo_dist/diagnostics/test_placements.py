"""Each collective that DTensor makes bears the change of placement that it carries out."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import proxy as fx_proxy
from torch.fx.traceback import annotate

import dynamo_dist
from dynamo_dist.testing import fake_mesh
from inductor_passes.graph.collectives import kind, launches
from inductor_passes.graph.printing import CAUSE, cause
from inductor_passes.inductor.graph_module import capturing


@pytest.fixture
def mesh():
    with fake_mesh(4, names=("tp",)) as made, dynamo_dist.enabled():
        yield made
    torch.compiler.reset()


def causes(fn, *args, backward=False):
    with capturing() as (backend, graphs):
        out = torch.compile(fn, backend=backend, fullgraph=True)(*args)
        if backward:
            out.sum().backward()
    return [(graph.phase, kind(n), cause(n)) for graph in graphs for n in launches(graph.graph)]


def shard(mesh, placement, **how):
    return DTensor.from_local(torch.ones(8, 8, **how), mesh, [placement], run_check=False)


def test_what_the_program_asks_for(mesh):
    x = shard(mesh, Shard(1))
    assert causes(lambda x: x.redistribute(placements=[Replicate()]).to_local(), x) == [
        ("inference", "all_gather", "Shard(1) -> Replicate() on tp")
    ]


def test_what_an_operator_asks_for(mesh):
    x, w = shard(mesh, Partial()), shard(mesh, Replicate())
    ((_, _, said),) = causes(lambda x, w: torch.relu(x @ w).to_local(), x, w)
    assert said == "Partial(sum) -> Replicate() on tp, for aten.relu.default"


def test_forward_and_backward_have_their_own(mesh):
    local = torch.ones(8, 8, requires_grad=True)

    def gathered(local):
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        y = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return y * y

    assert causes(gathered, local, backward=True) == [
        ("forward", "all_gather", "Shard(0) -> Replicate() on tp"),
        ("backward", "reduce_scatter", "Partial(sum) -> Shard(0) on tp"),
    ]


def test_what_the_user_annotates_is_left_as_it_is(mesh):
    """Also on what redistributing traces, in the forward and on what torch hands to the
    backward.
    """
    local = torch.ones(8, 8, requires_grad=True)
    staged = {"stage": 0}

    def gathered(local):
        with annotate(staged):
            x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            y = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return y * y

    with capturing() as (backend, graphs):
        torch.compile(gathered, backend=backend, fullgraph=True)(local).sum().backward()
    for graph in graphs:
        computed = [n for n in graph.graph.nodes if n.op == "call_function"]
        annotated = [n.meta["custom"] for n in computed if "custom" in n.meta]
        assert annotated and all(found == staged for found in annotated)
        assert [cause(n) != "" for n in launches(graph.graph)] == [True]


def test_disabling_undoes_it():
    before = list(fx_proxy._COPY_META_FIELDS)
    with dynamo_dist.enabled():
        assert fx_proxy._COPY_META_FIELDS == [*before, CAUSE]
    assert before == fx_proxy._COPY_META_FIELDS


def test_a_mesh_without_names():
    with fake_mesh(2, 2) as mesh, dynamo_dist.enabled():
        x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Shard(1)], run_check=False)
        found = causes(lambda x: x.full_tensor(), x)
    torch.compiler.reset()
    change = "Shard(0) -> Replicate() on mesh dim 0, Shard(1) -> Replicate() on mesh dim 1"
    assert {said for _, _, said in found} == {change}
