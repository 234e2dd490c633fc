"""register_strategy: eager asks it at once, and no decision made before is served."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

import dynamo_dist
from dynamo_dist.errors import ActivationError, StrategyError
from dynamo_dist.sharding import register_strategy, registration
from dynamo_dist.torch_compat import dtensor_dispatch, dynamo_compiler

SIN = torch.ops.aten.sin.default


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    dynamo_dist.disable()
    registration.registered.clear()


@pytest.fixture
def tensor(mesh):
    return distribute_tensor(torch.ones(16, 8), mesh, (Replicate(), Shard(0)), src_data_rank=None)


def everywhere(schema):
    now = schema.args_schema[0].strategies[0].output_spec
    spec = DTensorSpec(now.mesh, (Replicate(),) * now.mesh.ndim, tensor_meta=now.tensor_meta)
    return OpStrategy([OpSpec(spec, input_specs=[spec], redistribute_cost=[[0.0]])])


def test_eager_asks_it_from_now_on_and_upstream_after_disable(tensor):
    sharded = (Replicate(), Shard(0))
    dynamo_dist.enable()
    assert tensor.sin().placements == sharded  # the decision is in the cache now
    register_strategy(SIN)(everywhere)
    assert tensor.sin().placements == (Replicate(), Replicate())
    dynamo_dist.disable()
    assert tensor.sin().placements == sharded
    dynamo_dist.enable()
    assert tensor.sin().placements == (Replicate(), Replicate())


def test_it_wins_over_a_strategy_of_one_mesh_dimension(tensor):
    if SIN not in dtensor_dispatch.propagator().op_single_dim_strategy_funcs:
        pytest.skip("this torch decides sin otherwise")
    register_strategy(SIN)(everywhere)
    with dynamo_dist.enabled():
        assert tensor.sin().placements == (Replicate(), Replicate())
    assert SIN in dtensor_dispatch.propagator().op_single_dim_strategy_funcs


def test_its_source_is_part_of_the_compile_caches_keys():

    dynamo_dist.enable()
    before = dynamo_compiler.cache_key_tag()
    register_strategy(SIN)(everywhere)
    once = dynamo_compiler.cache_key_tag()
    register_strategy(SIN)(lambda schema: everywhere(schema))
    assert len({before, once, dynamo_compiler.cache_key_tag()}) == 3
    dynamo_dist.disable()
    assert dynamo_compiler.cache_key_tag() == ""


def test_one_that_torch_would_not_ask_is_an_error(monkeypatch):
    dynamo_dist.enable()
    register_strategy(SIN)(everywhere)
    propagator = dtensor_dispatch.propagator()
    monkeypatch.setattr(
        propagator, "propagate_op_sharding_non_cached", lambda schema: None, raising=False
    )
    with pytest.raises(ActivationError, match="eager would not ask it"):
        register_strategy(SIN)(everywhere)


def test_a_packet_is_refused():
    with pytest.raises(StrategyError) as caught:
        register_strategy(torch.ops.aten.sin)
    assert str(caught.value) == (
        "A strategy is registered for an overload of an operator, but got "
        "<OpOverloadPacket(op='aten.sin')>. A layout is decided for "
        "one signature. Name the overload, e.g. torch.ops.mylib.scale.default."
    )


def spec_like(schema, placements, mesh=None):
    now = schema.args_schema[0].strategies[0].output_spec
    return DTensorSpec(mesh or now.mesh, placements, tensor_meta=now.tensor_meta)


def wrong(outputs, inputs):
    def strategy(schema):
        specs = [spec_like(schema, p) for p in inputs]
        found = [spec_like(schema, p) for p in outputs]
        return OpStrategy(
            [
                OpSpec(
                    tuple(found) if len(found) > 1 else found[0],
                    input_specs=specs,
                    redistribute_cost=[[0.0]] * len(specs),
                )
            ]
        )

    return strategy


R, S0, S1 = Replicate(), Shard(0), Shard(1)
WRONG = {
    "returned 2 output specs for .*, expected 1": wrong([(R, S0), (R, S0)], [(R, S0)]),
    "returned 2 input specs for .*, expected 1": wrong([(R, S0)], [(R, S0), (R, R)]),
    "on a mesh of 2 dimensions": wrong([(R, S0)], [(S0,)]),
    r"shards dimension 5 of an argument of shape \(16, 8\)": wrong([(R, S0)], [(R, Shard(5))]),
    r"local results have shapes \[\(4, 8\)\], expected \[\(16, 2\)\]": wrong([(R, S1)], [(R, S0)]),
    "returned None for .*It must return an OpStrategy": lambda schema: None,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_right_is_refused(tensor, message):
    register_strategy(SIN)(WRONG[message])
    dynamo_dist.enable()
    with pytest.raises(StrategyError, match=rf"(?s)The strategy of aten.sin.default.*{message}"):
        tensor.sin()


def test_a_spec_of_another_mesh_is_refused(tensor, mesh):
    other = mesh["tp"]
    register_strategy(SIN)(
        lambda schema: OpStrategy(
            [
                OpSpec(
                    spec_like(schema, (R,), other),
                    input_specs=[spec_like(schema, (R,), other)],
                    redistribute_cost=[[0.0]],
                )
            ]
        )
    )
    dynamo_dist.enable()
    with pytest.raises(StrategyError, match="returned a spec of mesh"):
        tensor.sin()


def test_a_custom_operator(mesh):
    @torch.library.custom_op("dynamo_dist_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    def follow(schema):
        now = schema.args_schema[0].strategies[0].output_spec
        return OpStrategy([OpSpec(now, input_specs=[now], redistribute_cost=[[0.0]])])

    register_strategy(torch.ops.dynamo_dist_test.double.default)(follow)
    tensor = distribute_tensor(torch.ones(16, 8), mesh, (R, S0), src_data_rank=None)
    with dynamo_dist.enabled():
        found = double(tensor)
    assert isinstance(found, DTensor)
    assert found.placements == (R, S0)
    assert torch.equal(found.to_local(), torch.full((4, 8), 2.0))
