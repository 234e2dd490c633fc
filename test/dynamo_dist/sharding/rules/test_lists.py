"""Optimizers and clipping over weights that are DTensors and norms that are plain, in one list."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dynamo_dist.numerics.differences import joined
from dynamo_dist.numerics.ranks import split, whole_tensor
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat.dtensor_specs import LocalTensor

OPTIMIZERS = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how),
    "AdamW, amsgrad": lambda p, **how: torch.optim.AdamW(p, lr=0.1, amsgrad=True, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, **how),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WHOLE = [drawn(8, 4), drawn(4), drawn(5, 4), drawn(3)]  # plain are the second and the last


def everywhere(tensor):
    return joined(tensor, same_replicas=True)


def steps(parameters, gradients, optimizer):
    for scale in (1.0, 0.5):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * scale
        optimizer.step()
    return parameters


def alone(make):
    parameters = [nn.Parameter(each.clone()) for each in WHOLE]
    return steps(parameters, [each.cos() for each in WHOLE], make(parameters, foreach=False))


def mixed(values, mesh):
    """Plain ones are a tensor of its own on each rank: what is written to is written once a
    rank.
    """
    return [
        LocalTensor({rank: each.clone() for rank in range(mesh.size())})
        if at % 2
        else split(each, mesh, [Shard(0)])
        for at, each in enumerate(values)
    ]


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_the_numbers_of_one_device(ranks, name, how):
    make = OPTIMIZERS[name]
    parameters = [nn.Parameter(each) for each in mixed(WHOLE, ranks)]
    gradients = mixed([each.cos() for each in WHOLE], ranks)
    found = steps(parameters, gradients, make(parameters, **{how: True}))
    for one, other in zip(found, alone(make), strict=True):
        assert torch.allclose(everywhere(one), other, atol=1e-5)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_norms_are_clipped_together(ranks, foreach, order):
    """Five rows on four ranks: the last has none, of which the largest is taken too."""
    parameters = [nn.Parameter(each) for each in mixed(WHOLE, ranks)]
    for parameter, gradient in zip(parameters, mixed(WHOLE, ranks), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, 0.5, order, foreach=foreach)
    expected = torch.linalg.vector_norm(torch.cat([each.flatten() for each in WHOLE]), order)
    assert torch.allclose(whole_tensor(norm), expected)
    for parameter, whole in zip(parameters, WHOLE, strict=True):
        assert torch.allclose(everywhere(parameter.grad), whole * 0.5 / expected, atol=1e-5)


@pytest.mark.usefixtures("enabled")
def test_results_come_in_the_order_of_the_lists(ranks):
    values = mixed(WHOLE, ranks)
    found = torch._foreach_add(values, [1.0, 2.0, 3.0, 4.0])
    assert [isinstance(each, DTensor) for each in found] == [True, False, True, False]
    for at, (each, whole) in enumerate(zip(found, WHOLE, strict=True), 1):
        assert torch.equal(everywhere(each), whole + at)


@pytest.mark.usefixtures("enabled")
def test_a_pending_factor_is_finished_for_plain_entries(ranks):
    factor = split(torch.tensor(2.0), ranks, [Partial()])
    found = torch._foreach_mul(mixed(WHOLE, ranks), factor)
    assert torch.allclose(everywhere(found[1]), WHOLE[1] * 2)
    assert torch.allclose(everywhere(found[0]), WHOLE[0] * 2)


@pytest.mark.usefixtures("enabled")
def test_an_entry_that_mixes_is_still_refused(ranks):
    weight, bias = mixed(WHOLE[:2], ranks)
    with pytest.raises(
        RuntimeError, match=r"_foreach_add_.List.* got mixed torch.Tensor and DTensor"
    ):
        torch._foreach_add_([weight, bias], [torch.ones(8, 4), torch.ones(4)])


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_compiled_it_gives_eagers_numbers(mesh, how):
    def stepped(compiled):
        parameters = [
            nn.Parameter(
                each.clone()
                if at % 2
                else distribute_tensor(each, mesh["tp"], [Shard(0)], src_data_rank=None)
            )
            for at, each in enumerate(WHOLE)
        ]
        optimizer = OPTIMIZERS["AdamW"](parameters, **{how: True})
        if compiled:
            # Torch breaks the graph around every step of its optimizers.
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return steps(parameters, [each.detach() * 2 for each in parameters], optimizer)

    for one, other in zip(stepped(True), stepped(False), strict=True):
        one, other = (
            each.to_local() if isinstance(each, DTensor) else each for each in (one, other)
        )
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("compiled", [False, True])
def test_one_list_of_weights_on_several_meshes(compiled):
    """Experts have a mesh of their own; a list of them and of other weights is a list of each
    mesh.
    """

    def stepped(**how):
        weights = [
            nn.Parameter(distribute_tensor(value.clone(), part, [Shard(0)], src_data_rank=None))
            for value, part in zip((drawn(8, 4), drawn(4, 8), drawn(4, 4)), parts, strict=True)
        ]
        optimizer = torch.optim.Adam(weights, lr=0.1, **how)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(2):
            for weight in weights:
                weight.grad = weight.detach().cos()
            step()
        return weights

    with fake_mesh(2, 2, names=("dp", "ep")) as mesh:
        parts = (mesh["dp"], mesh["ep"], mesh["dp"])
        found = stepped(foreach=True, capturable=compiled)
        compiled = False
        for one, expected in zip(found, stepped(foreach=False), strict=True):
            assert one.device_mesh == expected.device_mesh
            torch.testing.assert_close(one.to_local(), expected.to_local())
