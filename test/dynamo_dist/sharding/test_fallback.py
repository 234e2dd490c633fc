"""What runs where no strategy decides, and what is refused."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import dynamo_dist
from dynamo_dist.errors import StrategyError
from dynamo_dist.numerics.differences import joined
from dynamo_dist.numerics.ranks import all_ranks, split, whole_tensor
from dynamo_dist.sharding import fallback

pytestmark = pytest.mark.usefixtures("enabled")


def test_an_operator_without_a_strategy_is_gathered_and_says_so(ranks, caplog):
    from dynamo_dist.sharding import fallback

    fallback._warned.clear()
    x = torch.arange(12.0).view(6, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = F.pdist(split(x, ranks, [Shard(0)]))
    assert torch.allclose(whole_tensor(found), F.pdist(x))
    (record,) = (r for r in caplog.records if r.name == fallback.__name__)
    assert record.getMessage() == (
        "aten._pdist_forward.default has no sharding strategy for (Shard(dim=0),): its arguments "
        "are gathered on every rank. dynamo_dist.sharding.register_rows gives it one."
    )


def test_decomposition_divides_by_the_global_element_count(ranks):
    x, y = torch.arange(10.0).view(5, 2), torch.ones(5, 2)
    a, b = split(x, ranks, [Shard(0)], True), split(y, ranks, [Shard(0)])
    F.huber_loss(a, b).backward()
    x.requires_grad_()
    F.huber_loss(x, y).backward()
    assert torch.allclose(whole_tensor(a.grad), x.grad)


@pytest.mark.parametrize("placement", [Partial(), Shard(0), Replicate()])
def test_writing_in_place_keeps_the_layout(ranks, placement):
    x = torch.arange(10.0).view(5, 2)
    found = split(x, ranks, [placement])
    assert found.sigmoid_() is found
    assert found.placements == (placement,)
    assert torch.allclose(whole_tensor(found), x.sigmoid(), atol=1e-5)


def test_shape_changed_in_place(ranks):
    x = torch.arange(5.0)
    found = split(x, ranks, [Shard(0)])
    found.unsqueeze_(0)
    assert (found.shape, found.placements) == ((1, 5), (Shard(1),))
    assert torch.equal(whole_tensor(found), x[None])
    found.squeeze_(0)
    assert torch.equal(whole_tensor(found), x)


def test_resized_in_place(ranks):
    x = torch.arange(12.0).view(6, 2)
    found = split(x, ranks, [Shard(0)])
    assert found.resize_(2, 4) is found
    assert (found.shape, found.placements) == ((2, 4), (Replicate(),))
    assert torch.equal(whole_tensor(found), torch.arange(8.0).view(2, 4))


def test_a_plain_tensor_made_in_a_backward_is_written_to(ranks):
    made = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            made.append(torch.zeros(gradient.shape).add_(gradient))
            return gradient * 2

    x = torch.arange(12.0).view(6, 2)
    Doubled.apply(split(x, ranks, [Shard(0)], True)).backward(split(x, ranks, [Shard(0)]))
    assert torch.equal(joined(made[0], same_replicas=True), x)


def test_a_number_read_from_a_pending_sum(ranks):
    assert split(torch.tensor([3.0]), ranks, [Partial()]).item() == pytest.approx(3.0)


def planted(call):
    return {}["no such key"]


def test_an_error_in_a_strategy_of_ours_is_no_gather(monkeypatch):
    from dynamo_dist.sharding import rules

    dynamo_dist.disable()
    monkeypatch.setitem(rules.indexing.INDEXING_ROWS, "aten.searchsorted.Tensor", planted)
    dynamo_dist.enable()
    with all_ranks(4) as ranks, pytest.raises(StrategyError) as caught:
        torch.searchsorted(split(torch.arange(8), ranks, [Shard(0)]), torch.tensor(3))
    assert str(caught.value).startswith(
        f"{__name__}.planted, which decides for aten.searchsorted.Tensor, failed for (8,) in "
        "(Shard(dim=0),), () in (Replicate(),): KeyError('no such key'). This is an error in "
        "dynamo_dist."
    )


def test_a_decomposition_out_of_memory_is_no_gather(ranks, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(fallback.dtensor_dispatch, "decomposition", lambda op: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ops.aten.trace(split(torch.ones(8, 8), ranks, [Shard(0)]))


def test_an_error_in_a_strategy_of_torch_is_a_gather(monkeypatch):
    from dynamo_dist.torch_compat import dtensor_dispatch

    dynamo_dist.disable()
    op = torch.ops.aten.view.default
    x = torch.arange(8.0)
    with monkeypatch.context() as patched:
        patched.setitem(dtensor_dispatch.propagator().op_strategy_funcs, op, planted)
        with dynamo_dist.enabled(), all_ranks(4) as ranks:
            found = split(x, ranks, [Shard(0)]).view(4, 2)
            assert found.placements == (Replicate(),)
            assert torch.equal(whole_tensor(found), x.view(4, 2))


def test_two_meshes_are_refused_by_name(grid):
    a = split(torch.ones(4, 2), grid, [Shard(0), Replicate()])
    from torch.distributed.device_mesh import init_device_mesh

    b = split(torch.ones(4, 2), init_device_mesh("cpu", (4,)), [Shard(0)])
    with pytest.raises(StrategyError, match=r"aten.renorm|aten.cdist|got DTensors of 2 meshes"):
        torch.ops.aten.block_diag([a, b])


def test_random_numbers_on_gathered_arguments_are_refused(ranks):
    @torch.library.custom_op(
        "dynamo_dist_test::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    def noise(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape)

    noise.register_fake(torch.empty_like)
    with pytest.raises(StrategyError) as caught:
        noise(split(torch.ones(4, 3), ranks, [Shard(0)]))
    assert str(caught.value) == (
        "dynamo_dist_test.noise.default draws random numbers and cannot run on (Shard(dim=0),). "
        "Each rank would draw its own: replicas would differ, and a pending sum would be drawn by "
        "none. Draw on the local tensors (tensor.to_local()), redistribute a pending sum first, or "
        "register a strategy with dynamo_dist.sharding.register_strategy."
    )


@pytest.fixture
def library():
    """Operators of others, made by torch.library's parts and not by its ``custom_op``."""
    library = torch.library.Library("dynamo_dist_test_others", "DEF")
    yield library
    library._destroy()


def test_an_operator_whose_schema_nothing_checks_is_refused(ranks, library):
    library.define("clear(Tensor x) -> ()")  # it writes, and does not say so
    library.impl("clear", lambda x: x.zero_() and None, "CPU")
    x = split(torch.ones(4, 3), ranks, [Shard(0)])
    with pytest.raises(StrategyError) as caught:
        torch.ops.dynamo_dist_test_others.clear(x)
    assert str(caught.value) == (
        "dynamo_dist_test_others.clear.default has no sharding strategy for (Shard(dim=0),), and "
        "it is no operator of aten, prims or torch.library.custom_op. Nothing checks what its "
        "schema says of the arguments that it writes to, or that it computes the same on every "
        "rank's copy of gathered arguments. Give it local tensors (tensor.to_local(), "
        "tensor.full_tensor()), make it with torch.library.custom_op, or register a strategy with "
        "dynamo_dist.sharding.register_strategy."
    )


def test_an_operator_made_of_others_needs_no_schema(ranks, library):
    library.define("less(Tensor x) -> Tensor")
    library.impl("less", lambda x: x - x.mean(), "CompositeImplicitAutograd")
    x = torch.arange(12.0).view(4, 3)
    found = torch.ops.dynamo_dist_test_others.less(split(x, ranks, [Shard(0)]))
    assert torch.allclose(whole_tensor(found), x - x.mean())


def test_a_custom_operator_is_gathered(ranks):
    @torch.library.custom_op("dynamo_dist_test::doubled", mutates_args=("out",))
    def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    x = torch.arange(12.0).view(4, 3)
    out = split(torch.zeros(4, 3), ranks, [Shard(1)])
    doubled(split(x, ranks, [Partial()]), out)
    assert torch.equal(whole_tensor(out), x * 2)


def test_undeclared_random_custom_operator_is_refused(ranks):
    @torch.library.custom_op("dynamo_dist_test::untagged", mutates_args=())
    def untagged(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape)

    with pytest.raises(StrategyError, match=r"dynamo_dist_test.untagged.default draws random"):
        untagged(split(torch.ones(4, 3), ranks, [Shard(0)]))


DRAWS = {
    "dropout": lambda x: F.dropout(x),
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    **{
        name: lambda x, name=name: getattr(x * 1, name)(*[0.5] * (name in ("geometric_",)))
        for name in ("uniform_", "normal_", "cauchy_", "exponential_", "geometric_", "bernoulli_")
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_in_place_for_a_pending_sum_are_refused(ranks, name):
    with pytest.raises(StrategyError, match=r"draws random numbers and cannot run on .*Partial"):
        DRAWS[name](split(torch.ones(4, 3), ranks, [Partial()]))


@pytest.mark.parametrize("name", sorted({*DRAWS} - {"cauchy_"}))
def test_numbers_drawn_in_place_for_shards(ranks, name):
    found = DRAWS[name](split(torch.ones(4, 3), ranks, [Shard(0)]))
    assert found.placements in ((Shard(0),), (Shard(1),))
