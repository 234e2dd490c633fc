"""One spec for each output of a compiled graph, as long as its sizes and mesh are the same."""

import gc
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.runtime.calls import unflatten


def pieces(t):
    names, spec = t.__tensor_flatten__()
    return {name: getattr(t, name) for name in names}, spec, t.shape, t.stride()


@pytest.fixture
def tensor(mesh):
    return distribute_tensor(torch.ones(8, 3), mesh["tp"], [Shard(0)], src_data_rank=None)


def test_equal_to_upstreams_and_with_one_spec(tensor):
    given = pieces(tensor)
    upstream = DTensor.__tensor_unflatten__(*given)
    first, second = unflatten(*given), unflatten(*given)
    assert first._spec is second._spec
    assert first._spec == upstream._spec and first.requires_grad == upstream.requires_grad
    assert (
        first.to_local() is not second.to_local() or first.to_local() is given[0]["_local_tensor"]
    )


def test_other_sizes_have_another_spec(tensor):
    inner, spec, size, stride = pieces(tensor)
    unflatten(inner, spec, size, stride)
    wider = unflatten(
        {**inner, "_local_tensor": torch.ones(4, 3)}, spec, torch.Size([16, 3]), (3, 1)
    )
    assert wider.shape == (16, 3)
    assert unflatten(inner, spec, size, stride).shape == (8, 3)


def test_gradients_of_a_compiled_step_share_specs_over_calls(tensor, enabled):
    weight = tensor.requires_grad_()
    step = torch.compile(lambda w: (w * w).sum(), backend="aot_eager", fullgraph=True)
    specs = []
    for _ in range(3):
        weight.grad = None
        step(weight).backward()
        assert torch.equal(weight.grad.to_local(), 2 * weight.to_local())
        specs.append(weight.grad._spec)
    assert specs[1] is specs[2]
    assert specs[0] == specs[1] and weight.grad.placements == (Shard(0),)


def test_nothing_is_held_after_disable(mesh):
    made = distribute_tensor(torch.ones(8, 3), mesh["tp"], [Shard(0)], src_data_rank=None)
    with dynamo_dist.enabled():
        spec = weakref.ref(DTensor.__tensor_unflatten__(*pieces(made))._spec)
        gc.collect()
        assert spec() is not None
    gc.collect()
    assert spec() is None


def test_dynamic_sizes(mesh, enabled):
    step = torch.compile(lambda t: t + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 6, 4):
        t = distribute_tensor(torch.ones(rows, 2), mesh["tp"], [Replicate()], src_data_rank=None)
        assert step(t).shape == (rows, 2)
        assert step(t)._spec.tensor_meta.shape == (rows, 2)
