"""Recording, planning and carrying out, on a fake group of four ranks."""

import logging

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dynamo_dist.diagnostics import collector
from dynamo_dist.planning import file, repair
from dynamo_dist.planning.cost import prices_of
from dynamo_dist.testing import fake_mesh


def mlp(x, up, down):
    """Column, then row; the norm of the middle makes upstream gather it."""
    h = x @ up
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1.0)
    return torch.relu(h) @ down


def spread(shape, mesh, placement):
    return distribute_tensor(torch.ones(shape), mesh, [placement], src_data_rank=None)


def inputs(mesh, x=Replicate()):
    return (
        spread((64, 32), mesh, x),
        spread((32, 128), mesh, Shard(1)),
        spread((128, 32), mesh, Shard(0)),
    )


def planned(fn, args, path=None, seen=None):
    """``fn`` compiled by a plan; ``seen`` gets the graphs that the compiler was given."""

    def compile_(gm, given):
        if seen is not None:
            seen.append(gm)
        return aot_eager(gm, given)

    def backend(gm, given):
        prices = prices_of("h100x8", given)
        return repair.compile_repaired(gm, given, compile_, prices, "test", path)

    return torch.compile(fn, backend=backend, fullgraph=True)(*args)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def mesh():
    with fake_mesh(4) as made:
        yield made


def test_the_plan_of_a_small_program(mesh, tmp_path):
    path = str(tmp_path / "plan.json")
    with torch.no_grad():
        out = planned(mlp, inputs(mesh), path)
        expected = mlp(*inputs(mesh))
    assert out.placements == expected.placements
    (plan,) = file.load_plans(path).values()
    assert sum(plan.planned_us) < sum(plan.upstream_us)
    assert plan.bound_us <= sum(plan.planned_us) + 1e-6
    shown = [f"{row.text}: {row.upstream} => {row.inputs}" for row in plan.rows]
    assert_expected_inline(
        "\n".join(shown),
        """\
aten.mm.default(*, *): (('R',), ('S1',)) => (('R',), ('R',))
aten.pow.Tensor_Scalar(*, 2): (('S1',),) => (('R',),)
aten.mean.dim(*, [-1], True): (('S1',),) => (('R',),)
aten.add.Tensor(*, 1.0): (('R',),) => (('R',),)
aten.rsqrt.default(*): (('R',),) => (('R',),)
aten.mul.Tensor(*, *): (('S1',), ('R',)) => (('S1',), ('R',))
aten.relu.default(*): (('S1',),) => (('S1',),)
aten.mm.default(*, *): (('S1',), ('S0',)) => (('S1',), ('S0',))
redistribute: (('P',),) => (('P',),)""",
    )


def test_plan_file_that_does_not_fit_names_the_operation(mesh, tmp_path, caplog):
    path = tmp_path / "plan.json"
    with torch.no_grad():
        planned(mlp, inputs(mesh), str(path))
        path.write_text(path.read_text().replace("aten.relu.default(*)", "aten.gelu.default(*)"))
        torch.compiler.reset()
        with caplog.at_level(logging.WARNING):
            out = planned(mlp, inputs(mesh), str(path))
    assert out.shape == (64, 32)
    assert "is 'aten.relu.default(*)', and the plan expects 'aten.gelu.default(*)'" in caplog.text


@pytest.mark.parametrize("word", ["S7", "R | R", "?no such"])
def test_plan_with_an_impossible_placement_is_named_and_skipped(mesh, tmp_path, caplog, word):
    path = tmp_path / "plan.json"
    with torch.no_grad():
        planned(mlp, inputs(mesh), str(path))
        old, new = (
            '"upstream": ["S1"], "inputs": ["S1"]',
            f'"upstream": ["S1"], "inputs": ["{word}"]',
        )
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        torch.compiler.reset()
        with caplog.at_level(logging.WARNING):
            assert planned(mlp, inputs(mesh), str(path)).shape == (64, 32)
    assert "Compiled without a plan. The plan " in caplog.text
    assert repr(word) in caplog.text


def test_a_plan_of_ours_that_cannot_be_read_is_made_anew(mesh, tmp_path, caplog):
    with torch.no_grad():
        planned(mlp, inputs(mesh))
        (kept,) = (tmp_path / "cache").rglob("plans/*.json")
        kept.write_text("{")
        torch.compiler.reset()
        planned(mlp, inputs(mesh))
    assert file.load_plans(str(kept))
    assert caplog.text.count("planned 9 steps") == 2


def test_reports_say_from_which_file_a_plan_is(mesh, tmp_path):
    path = str(tmp_path / "plan.json")
    records = []
    unsubscribe = collector.subscribe_to_plans(records.append)
    with torch.no_grad():
        for given in (None, None, path, path):
            planned(mlp, inputs(mesh), *([given] if given else []))
            torch.compiler.reset()
    unsubscribe()
    (kept,) = (tmp_path / "cache").rglob("plans/*.json")
    assert [record.source for record in records] == ["", str(kept), str(kept), path]


def test_a_plan_that_cannot_be_kept_is_followed(mesh, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "dynamo_dist").touch()
    with torch.no_grad():
        planned(mlp, inputs(mesh))
    assert "The plan is followed, but " in caplog.text


def test_an_edited_file_is_carried_out(mesh, tmp_path):
    """The user takes the batch apart before the first product: every step follows."""
    path, seen = tmp_path / "plan.json", []
    with torch.no_grad():
        planned(mlp, inputs(mesh), str(path))
        stored = file.load_plans(str(path))
        ((name, plan),) = stored.items()
        rows = list(plan.rows)
        first = next(i for i, row in enumerate(rows) if row.text.startswith("aten.mm"))
        rows[first] = file.PlanRow(
            rows[first].text, rows[first].upstream, (("S0",), ("R",)), (("S0",),)
        )
        edited = file.StoredPlan(tuple(rows), *((plan.upstream_us, plan.planned_us, 0.0, "edited")))
        file.save_plan(str(path), {name: edited})
        torch.compiler.reset()
        planned(mlp, inputs(mesh), str(path), seen)
    assert len(seen) == 1
    assert file.load_plans(str(path)) == {name: edited}


def test_a_plan_is_found_again(mesh, monkeypatch):
    with torch.no_grad():
        planned(mlp, inputs(mesh))
        monkeypatch.setattr(repair, "record", None)  # nothing is traced a second time
        torch.compiler.reset()
        planned(mlp, inputs(mesh))


def test_a_program_without_dtensors_is_left_alone(mesh):
    seen = []
    planned(lambda x: x.sin(), (torch.ones(4),), seen=seen)
    (gm,) = seen
    assert "enter" not in gm.code


def test_program_that_writes_into_a_view_has_no_plan(mesh, caplog):
    def writes(x, w):
        y = x @ w
        y.t().add_(1.0)
        return y

    with torch.no_grad(), caplog.at_level(logging.WARNING):
        x, up, _ = inputs(mesh)
        planned(writes, (x, up))
    assert "writes in place into a view" in caplog.text


def test_every_rank_asks_for_the_same_plan():
    digests = set()
    for rank in range(4):
        with fake_mesh(2, 2, rank=rank):
            digests.add(prices_of("h100x8", ()).digest())
    with fake_mesh(2, 4):
        other = prices_of("h100x8", ()).digest()
    assert len(digests) == 1 and other not in digests
