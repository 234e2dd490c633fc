"""Lists whose entries lie alike are run on local tensors: the second time, and with torch's
results.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_strategies

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mesh():
    with fake_mesh(4) as made:
        yield made


@pytest.fixture
def asked(monkeypatch):
    """Calls that were left to torch."""
    calls, upstream = [], dtensor_dispatch.as_upstream

    def counted(op, *rest):
        calls.append(op)
        return upstream(op, *rest)

    monkeypatch.setattr(dtensor_dispatch, "as_upstream", counted)
    return calls


def drawn(mesh, *placements, shape=(8, 6), dtype=None, seed=0):
    """A list with an entry of each placement; the last shard of 6 rows on 4 ranks is empty."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.rand(shape, generator=generator) + 1 for _ in placements]
    whole = [each.to(dtype) if dtype else each for each in whole]
    return [
        DTensor.from_local(each, mesh, [placement])
        if isinstance(placement, Partial)
        else distribute_tensor(each, mesh, [placement], src_data_rank=None)
        for each, placement in zip(whole, placements, strict=True)
    ]


ALIKE = (Shard(0), Shard(1), Replicate())


def number(mesh, value=2.0):
    return distribute_tensor(torch.tensor(value), mesh, [Replicate()], src_data_rank=None)


# Name -> (operator, arguments made of a function that gives lists, keywords)
DIRECT = {
    "sqrt": lambda of, mesh: (torch._foreach_sqrt, (of(1),), {}),
    "add, another list": lambda of, mesh: (torch._foreach_add, (of(1), of(2)), {"alpha": 2}),
    "add_, a number": lambda of, mesh: (torch._foreach_add_, (of(1), 1.5), {}),
    "mul_, a number for each": lambda of, mesh: (torch._foreach_mul_, (of(1), [1.0, 2.0, 3.0]), {}),
    "mul_, a tensor for all": lambda of, mesh: (torch._foreach_mul_, (of(1), number(mesh)), {}),
    "addcdiv_": lambda of, mesh: (torch._foreach_addcdiv_, (of(1), of(2), of(3)), {"value": -0.5}),
    "lerp": lambda of, mesh: (torch._foreach_lerp, (of(1), of(2), 0.25), {}),
    "clamp_max": lambda of, mesh: (torch._foreach_clamp_max, (of(1), 1.5), {}),
    "norm": lambda of, mesh: (torch._foreach_norm, (of(1), 2.0), {}),
    "norm, order 1": lambda of, mesh: (torch._foreach_norm, (of(1), 1), {}),
    "adamw, fused, steps": lambda of, mesh: (
        torch._fused_adamw_,
        (of(1), of(2), of(3), of(4), [], [torch.tensor(3.0) for _ in ALIKE]),
        {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False,
         "maximize": False},
    ),
}  # fmt: skip


def parts(results, args):
    """What can be told of results, and of what was written to."""
    tensors = [*(results or ()), *args[0]]
    return [(t._local_tensor, t._spec, t._spec.tensor_meta, t.requires_grad) for t in tensors]


def outcome(make, of, mesh):
    op, args, kwargs = make(of, mesh)
    return parts(op(*args, **kwargs), args)


@pytest.mark.parametrize("shape", [(8, 6), (6, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", DIRECT)
def test_the_second_time_torch_is_not_asked_and_says_the_same(mesh, asked, name, shape):
    make = DIRECT[name]

    def of(seed):
        return drawn(mesh, *ALIKE, shape=shape, seed=seed)

    expected = outcome(make, of, mesh)
    with dynamo_dist.enabled():
        first, times = outcome(make, of, mesh), len(asked)
        second = outcome(make, of, mesh)
        assert times == 1 and len(asked) == 1
    for found in (first, second):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0], other[0]) and one[1:] == other[1:]


def test_a_result_s_type_is_that_of_the_numbers_given(mesh, asked):
    with dynamo_dist.enabled():
        for value in (2, 2.5, 2, 2.5, [2, 2, 2], [2.5, 2.5, 2.5], [2, 2, 2], [2, 2.5, 2]):
            found = torch._foreach_mul(drawn(mesh, *ALIKE, dtype=torch.int64), value)
            each = value if isinstance(value, list) else [value] * 3
            wanted = [torch.float32 if isinstance(n, float) else torch.int64 for n in each]
            assert [each.dtype for each in found] == wanted
    assert len(asked) == 5


OTHERWISE = {
    "pending": lambda mesh: (torch._foreach_add, (drawn(mesh, Partial()), drawn(mesh, Partial()))),
    "lies elsewhere": lambda mesh: (
        torch._foreach_add,
        (drawn(mesh, Shard(0)), drawn(mesh, Shard(1), seed=1)),
    ),
    "another shape": lambda mesh: (
        torch._foreach_add,
        (drawn(mesh, Shard(0)), drawn(mesh, Replicate(), shape=(6,), seed=1)),
    ),
    "a pending number": lambda mesh: (
        torch._foreach_mul,
        (drawn(mesh, Replicate()), DTensor.from_local(torch.tensor(2.0), mesh, [Partial()])),
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_does_not_lie_alike_is_torch_s(mesh, asked, name):
    op, args = OTHERWISE[name](mesh)
    expected = op(*args)
    with dynamo_dist.enabled():
        for _ in range(3):
            op, args = OTHERWISE[name](mesh)
            found = op(*args)
            assert [f.placements for f in found] == [e.placements for e in expected]
            assert all(
                torch.equal(f.to_local(), e.to_local())
                for f, e in zip(found, expected, strict=True)
            )
    assert len(asked) == 3


def test_specs_that_change_are_noticed(mesh):
    with dynamo_dist.enabled():
        same = drawn(mesh, Shard(0), Shard(0))
        for placement in (Shard(0), Shard(1), Shard(0), Replicate()):
            other = [same[0], *drawn(mesh, placement)]
            found = torch._foreach_neg(other)
            assert [each.placements for each in found] == [(Shard(0),), (placement,)]
            assert torch.equal(found[1].to_local(), -other[1].to_local())


def test_lists_that_begin_alike_are_told_apart(mesh, asked):
    with dynamo_dist.enabled():
        for _ in range(3):
            for other in (Shard(1), Replicate()):
                found = torch._foreach_neg(drawn(mesh, Shard(0), other))
                assert [each.placements for each in found] == [(Shard(0),), (other,)]
    assert len(asked) == 2


def test_nothing_is_kept_after_disable(mesh):
    with dynamo_dist.enabled():
        torch._foreach_neg(drawn(mesh, *ALIKE))
        assert dtensor_strategies.answers_for_lists
    assert not dtensor_strategies.answers_for_lists


def test_optimizers_take_torch_s_steps(mesh):
    def steps(make):
        parameters = [torch.nn.Parameter(each) for each in drawn(mesh, *ALIKE)]
        optimizer = make(parameters)
        for seed in (1, 2, 3):
            for parameter, gradient in zip(parameters, drawn(mesh, *ALIKE, seed=seed), strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        return [each.to_local() for each in parameters]

    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True, centered=True),
        lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ):
        expected = steps(make)
        with dynamo_dist.enabled():
            found = steps(make)
        assert all(map(torch.equal, found, expected))
