"""register_rows: another's operator in three lines, and what is made of them: shards, prices,
keys of caches.
"""

import importlib
import sys

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import dynamo_dist
from dynamo_dist import graph_compile
from dynamo_dist.errors import StrategyError
from dynamo_dist.numerics.ranks import split, whole_tensor
from dynamo_dist.planning import feature, repair
from dynamo_dist.planning.cost import prices_of
from dynamo_dist.planning.file import load_plans
from dynamo_dist.sharding import register_rows, registration
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat import dynamo_compiler
from inductor_passes import PassOptions, plugins

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@torch.library.custom_op("dynamo_dist_test::centred", mutates_args=())
def centred(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Each row of x without its mean, times the whole of ``by``: torch knows no strategy of it."""
    return (x - x.mean(1, keepdim=True)) * by.sum()


@centred.register_fake
def _(x, by):
    return torch.empty_like(x)


OP = torch.ops.dynamo_dist_test.centred.default


def rows(call):
    return [call.row([S0], x=S0), call.row([P], x=P), call.row([P], by=P)]


@pytest.fixture(autouse=True)
def registered():
    register_rows(OP, rows)
    dynamo_dist.enable()
    yield
    dynamo_dist.disable()
    registration.registered.clear()


@pytest.mark.parametrize("count", [8, 7, 5, 3])  # even, uneven, and too few for all ranks
@pytest.mark.parametrize("at", [S0, S1, P, R])
@pytest.mark.parametrize("by", [S0, R])
def test_values_are_one_devices_in_every_layout(ranks, count, at, by):
    x, y = torch.randn(count, 6), torch.randn(4)
    found = centred(split(x, ranks, [at]), split(y, ranks, [by]))
    torch.testing.assert_close(whole_tensor(found), centred(x, y))


@pytest.mark.parametrize(("count", "any_part", "launches"), [(7, 0, 0), (3, 0, 1), (3, 1, 0)])
def test_rows_are_gathered_only_where_a_rank_has_none(ranks, count, any_part, launches):
    register_rows(OP, rows, any_part=bool(any_part))
    x, y = torch.randn(count, 6), torch.randn(4)
    with CommDebugMode() as launched:
        found = centred(split(x, ranks, [S0]), split(y, ranks, [R]))
    assert launched.get_total_counts() == launches
    assert launches or found.placements == (S0,)


def test_sharding_rules_of_mesh_dimensions_are_independent(grid):
    x, y = torch.randn(5, 6), torch.randn(4)
    with CommDebugMode() as launched:
        found = centred(split(x, grid, [S0, P]), split(y, grid, [R, R]))
    assert found.placements == (S0, P) and launched.get_total_counts() == 0
    torch.testing.assert_close(whole_tensor(found), centred(x, y))


@pytest.mark.parametrize(("count", "placement"), [(64, S0), (4, S1)])
def test_the_smaller_argument_is_moved(mesh, count, placement):
    """Both rows take one argument as it is and gather the other one."""
    register_rows(OP, lambda call: [call.row([S0], x=S0), call.row([S1], x=S1, by=S0)])
    x = distribute_tensor(torch.ones(count, 8), mesh["tp"], [placement], src_data_rank=None)
    by = distribute_tensor(torch.ones(16), mesh["tp"], [S0], src_data_rank=None)
    assert centred(x, by).placements == (placement,)


def planned(path, folder, monkeypatch):
    """The plan of a product by columns, before an operator that needs whole rows."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def compile_by_plan(gm, given):
        prices = prices_of("h100x8", given)
        return repair.compile_repaired(gm, given, lambda gm, _: gm.forward, prices, "", str(path))

    def step(x, w, by):
        return centred(x @ w, by)

    torch.compiler.reset()
    with fake_mesh(4) as mesh, torch.no_grad():
        given = (((4096, 512), R), ((512, 4096), S1), ((4,), R))
        inputs = [distribute_tensor(torch.ones(s), mesh, [p], src_data_rank=None) for s, p in given]
        torch.compile(step, backend=compile_by_plan, fullgraph=True)(*inputs)
    (plan,) = load_plans(str(path)).values()
    return plan


def test_the_planner_weighs_them(tmp_path, monkeypatch):
    by_rows = planned(tmp_path / "rows.json", tmp_path, monkeypatch)
    assert by_rows.rows[1].inputs == (("S0",), ("R",))
    register_rows(OP, lambda call: [])
    whole = planned(tmp_path / "whole.json", tmp_path, monkeypatch)
    assert whole.rows[1].inputs == (("R",), ("R",))
    assert sum(by_rows.planned_us) < sum(whole.planned_us)


def test_a_plan_is_not_found_again_under_other_rows(mesh, monkeypatch):
    asked = []
    graph_compile.register_options()
    monkeypatch.setattr(feature, "compile_repaired", lambda *given: asked.append(given[4]))
    for listed in (rows, rows, lambda call: []):
        dynamo_dist.disable()
        register_rows(OP, listed)
        dynamo_dist.enable()
        options = PassOptions(extra={"plan": "repair"}, topology="h100x8")
        feature.compile_planned(None, [], None, options)
    first, again, other = asked
    assert first == again != other


def test_a_helper_that_changes_is_another_key(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "rules.py").write_text(
        "from mine.helper import dims\n"
        "from torch.distributed.tensor import Shard\n\n"
        "def rows(call):\n    return [call.row([Shard(d)], x=Shard(d)) for d in dims()]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def tag(helper):
        (folder / "helper.py").write_text(helper)
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
        plugins.digest_of_sources.cache_clear()
        importlib.invalidate_caches()
        dynamo_dist.disable()
        register_rows(OP, importlib.import_module("mine.rules").rows)
        dynamo_dist.enable()
        return dynamo_compiler.cache_key_tag()

    first = tag("def dims():\n    return [0]\n")
    assert tag("def dims():\n    return [1]\n") != first
    assert tag("def dims():\n    return [0]\n") == first


def test_a_name_that_the_operator_has_not_is_an_error(ranks):
    register_rows(OP, lambda call: [call.row([S0], input=S0)])
    with pytest.raises(StrategyError) as caught:
        centred(split(torch.ones(8, 4), ranks, [S0]), split(torch.ones(4), ranks, [R]))
    assert str(caught.value) == (
        "A row of dynamo_dist_test.centred.default places ['input'], expected some of ['x', 'by']. "
        "A row places arguments by the "
        "names of the operator's schema. Write them as in dynamo_dist_test::centred(Tensor x, "
        "Tensor by) -> Tensor."
    )
