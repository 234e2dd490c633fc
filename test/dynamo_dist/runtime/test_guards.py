"""Cheaper guards fail when upstream's would: the same programs, recompiled as often."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dynamo_dist.runtime.guards import identity_first, is_equal, is_immutable, lighten
from dynamo_dist.torch_compat import aot_runtime, dynamo_guards


@pytest.fixture
def compiles(enabled, monkeypatch):
    """``compiles(fn)``: ``fn`` compiled as our backend does up to Inductor, and its compiles so
    far.
    """
    guards = []

    def backend(graph, inputs):
        before = len(dynamo_guards.guards().inner)
        lighten()
        guards.append((before, len(dynamo_guards.guards().inner)))
        return graph.forward

    return lambda fn: (torch.compile(fn, backend=backend, fullgraph=True), guards)


@pytest.fixture
def mlp(mesh):
    def make():
        made = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return parallelize_module(made, mesh["tp"], plan)

    return make


def weight(mesh, *placements):
    return nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placements, src_data_rank=None))


def test_there_are_fewer(compiles, mlp):
    step, guards = compiles(mlp())
    step(torch.ones(2, 8))
    ((before, after),) = guards
    assert after < 0.9 * before


def test_an_equal_spec_passes_and_another_placement_recompiles(compiles, mlp, mesh):
    model = mlp()
    step, guards = compiles(model)
    x = torch.ones(2, 8)
    step(x)
    model[0].weight = weight(mesh["tp"], Shard(0))
    step(x)
    assert len(guards) == 1
    model[0].weight = weight(mesh["tp"], Replicate())
    assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def test_another_mesh_recompiles(compiles, mesh):
    step, guards = compiles(lambda t: t.to_local() + t.device_mesh.size())
    for each in (mesh["tp"], mesh["tp"], mesh["dp"]):
        t = distribute_tensor(torch.ones(8), each, [Replicate()], src_data_rank=None)
        assert step(t)[0] == 1 + each.size()
    assert len(guards) == 2


def scaled(factors):
    """A hook whose closure holds a partial of ``factors``."""
    scale = functools.partial(times, factors)

    def hook(module, args, output):
        return scale(output)

    def bind(factors):
        nonlocal scale
        scale = functools.partial(times, factors)

    return hook, bind


def times(factors, output, extra=1):
    return output * factors[0] * extra


def test_a_hook_whose_closure_is_bound_anew_recompiles(compiles):
    model = nn.Linear(4, 4)
    hook, bind = scaled((2.0,))
    model.register_forward_hook(hook)
    step, guards = compiles(model)
    x = torch.ones(1, 4)
    step(x)
    step(x)
    assert len(guards) == 1
    bind((3.0,))
    assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def added(module):
    module.register_forward_hook(scaled((3.0,))[0])


def added_before(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def taken_away(module):
    module._forward_hooks.clear()


def replaced(module):
    (key,) = module._forward_hooks
    module._forward_hooks[key] = scaled((3.0,))[0]


def other_dictionary(module):
    module._forward_hooks = OrderedDict({0: scaled((3.0,))[0]})


def always_called(module):
    (key,) = module._forward_hooks
    module._forward_hooks_always_called[key] = True


@pytest.mark.parametrize(
    "patch",
    [
        added,
        added_before,
        taken_away,
        replaced,
        other_dictionary,
        always_called,
    ],
)
def test_other_hooks_recompile(compiles, patch):
    model = nn.Linear(4, 4)
    model.register_forward_hook(scaled((2.0,))[0])
    step, guards = compiles(model)
    x = torch.ones(1, 4)
    for _ in range(2):
        step(x)
    assert len(guards) == 1
    patch(model)
    for _ in range(2):
        assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def test_guards_read_the_closure_of_a_hook_registered_again(
    compiles,
):
    model = nn.Linear(4, 4)
    hook, bind = scaled((2.0,))
    handle = model.register_forward_hook(hook)
    step, guards = compiles(model)
    x = torch.ones(1, 4)
    for _ in range(3):
        step(x)
        handle.remove()
        handle = model.register_forward_hook(hook)
    assert len(guards) == 1
    bind((3.0,))
    assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def test_guards_read_closures_of_another_modules_equal_hooks(compiles):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.register_forward_hook(scaled((2.0,))[0])
    hook, bind = scaled((2.0,))
    second.register_forward_hook(hook)
    step, guards = compiles(lambda model, x: model(x))
    x = torch.ones(1, 4)
    for model in (first, second, first, second):
        step(model, x)
    assert len(guards) == 1
    bind((3.0,))
    assert torch.equal(step(second, x), second(x))
    assert len(guards) == 2


def test_a_partial_that_gains_a_keyword_recompiles(compiles):
    model = nn.Linear(4, 4)
    hook, _ = scaled((2.0,))
    model.register_forward_hook(hook)
    step, guards = compiles(model)
    x = torch.ones(1, 4)
    step(x)
    scale = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))["scale"]
    scale.cell_contents.keywords["extra"] = 5
    assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def test_equal_hooks_made_anew_for_every_call_do_not_recompile(compiles):
    model = nn.Linear(4, 4)
    hook, bind = scaled((2.0,))
    model.register_forward_hook(hook)
    step, guards = compiles(model)
    for _ in range(5):
        bind((2.0,))
        step(torch.ones(1, 4))
    assert len(guards) == 1


def test_equal_layers_share_one_compile(compiles, mlp):
    step, guards = compiles(lambda model, x: model(x))
    for _ in range(3):
        step(mlp(), torch.ones(2, 8))
    assert len(guards) == 1


@pytest.mark.parametrize(
    ("equal", "a", "b"),
    [
        (True, functools.partial(times, (Shard(0),)), functools.partial(times, (Shard(0),))),
        (True, (1, "a"), (1, "a")),
        (False, functools.partial(times, (Shard(0),)), functools.partial(times, (Shard(1),))),
        (False, functools.partial(times, (1,)), functools.partial(times, (1,), extra=2)),
        (False, functools.partial(times, (1,)), functools.partial(times, (True,))),
        (False, (1,), (1, 2)),
        (False, times, scaled),
        (False, (lambda a: a), (lambda a: a)),
        (False, scaled((1,))[0], scaled((1,))[0]),
    ],
)
def test_equal_values(equal, a, b):
    assert is_equal(a, b) is equal


def test_a_function_made_anew_by_the_same_line_is_equal():
    a, b = ((lambda t: t + 1) for _ in range(2))
    assert a is not b and is_equal(a, b)


@pytest.mark.parametrize(
    ("settled", "value"),
    [
        (True, functools.partial(times, (Shard(0), None), "name")),
        (True, times),
        (True, Shard(0)),
        (False, functools.partial(times, [Shard(0)])),
        (False, functools.partial(times, (1,), extra=2)),
        (False, functools.partial(lambda a: a, object())),
        (False, 1000),
        (False, {}),
        (False, (Shard(0),)),
    ],
)
def test_what_can_change_while_it_is_the_same_object(settled, value):
    assert is_immutable(value) is settled


def test_a_function_is_as_settled_as_what_it_closes_over():
    cell = 1

    def reads():
        return cell

    assert not is_immutable(reads)


def test_the_check_is_not_asked_about_the_object_itself(mesh):
    asked = []
    tp, same, dp = (mesh[name] for name in ("tp", "tp", "dp"))
    spec, equal, other = (weight(each, Shard(0))._spec for each in (tp, tp, dp))

    def check(value):
        asked.append(value)
        return value == (spec if isinstance(value, type(spec)) else tp)

    guard = identity_first(tp, check)
    assert guard(tp) and asked == []
    assert guard(same) and not guard(dp) and len(asked) == 1 + (same is not tp)
    asked.clear()
    guard = identity_first(spec, check)
    assert guard(spec) and guard(equal) and asked == []
    assert not guard(other) and asked == [other]
    assert identity_first([1], check) is check


def test_a_cell_that_is_emptied_recompiles(compiles):
    model = nn.Linear(4, 4)
    hook, _ = scaled((2.0,))
    model.register_forward_hook(hook)
    step, _ = compiles(model)
    x = torch.ones(1, 4)
    step(x)
    del hook.__closure__[0].cell_contents
    with pytest.raises(Exception, match="scale"):
        step(x)


def test_another_code_recompiles(compiles):
    model = nn.Linear(4, 4)
    hook, _ = scaled((2.0,))
    model.register_forward_hook(hook)
    step, guards = compiles(model)
    x = torch.ones(1, 4)
    step(x)

    def other():
        scale = None
        return lambda module, args, output: scale(output) + 1

    hook.__code__ = other().__code__
    assert torch.equal(step(x), model(x))
    assert len(guards) == 2


def test_guards_skip_our_code_and_keep_what_it_reads(enabled, mesh):
    own = []

    def backend(graph, inputs):
        lighten()
        named = [
            (dynamo_guards.module_and_member(guard), guard.name)
            for guard in dynamo_guards.guards().inner
        ]
        own.extend(name for at, name in named if at and at[0].startswith("dynamo_dist"))
        return graph.forward

    all_reduce = torch.distributed.all_reduce  # no module of the program leads to the default group
    torch.compile(lambda x: all_reduce(x), backend=backend, fullgraph=True)(torch.ones(4))
    assert own
    assert all("group" in name and "WORLD" in name for name in own)


def test_outside_a_compile_upstreams_way_is_in_place():
    lighten()
    assert DTensor.__tensor_unflatten__ is aot_runtime.upstream_unflatten
