import json
import math

import pytest

from dynamo_dist.benchmark.records import (
    Comparison,
    RankResult,
    Simulated,
    VariantResult,
    over_ranks,
)
from dynamo_dist.benchmark.table import as_text


def result(variant, rank=0, **more):
    given = {
        "max_output_diff": 0.0 if variant == "eager" else 1e-7 * (rank + 1),
        "max_grad_diff": 0.0,
        "worst": "" if variant == "eager" else "output",
        "graphs": 0 if variant == "eager" else 1,
        "launches": {"all_reduce": 2, "all_gather": 1},
        "first_s": 0.5,
        "step_ms": (3.0, 1.0 + rank, 2.0 + rank),
        "memory_bytes": 64 << 20,
        "memory_source": "process RSS, peak",
    }
    if variant == "ours":
        given["simulated"] = Simulated("h100x8", 20.0, 5.0 + rank, 2048, 1024)
    return VariantResult(variant, **{**given, **more})


def comparison(**ours):
    ranks = tuple(
        RankResult(
            rank,
            (result("eager", rank), result("stock", rank), result("ours", rank, **ours)),
        )
        for rank in range(2)
    )
    return Comparison(ranks, world_size=2, steps=3, backward=False, device="CPU", topology="h100x8")


def test_merged_takes_the_worst_rank():
    ours = comparison().merged["ours"]
    assert ours.max_output_diff == pytest.approx(2e-7)
    assert ours.step_ms == (3.0, 2.0, 3.0) and ours.step_ms_median == 3.0
    assert ours.step_ms_spread == (2.0, 3.0)
    assert ours.simulated.exposed_us_after == 6.0
    assert ours.launches == {"all_reduce": 2, "all_gather": 1}


def test_not_a_number_is_worse_than_any_difference():
    merged = over_ranks([result("ours", max_grad_diff=1.0), result("ours", max_grad_diff=math.nan)])
    assert math.isnan(merged.max_grad_diff)


@pytest.mark.parametrize(
    ("ours", "ok"),
    [({}, True), ({"within_tolerance": False}, False), ({"graph_breaks": 1}, False)],
)
def test_ok_needs_one_graph_and_eagers_numbers(ours, ok):
    assert comparison(**ours).ok is ok


def test_json_goes_and_comes_back():
    given = comparison(max_grad_diff=math.inf)
    data = json.loads(json.dumps(given.to_json(), allow_nan=False))
    assert data["schema"] == 1 and data["merged"]["ours"]["step_ms_median"] == 3.0
    assert tuple(RankResult.from_json(rank) for rank in data["ranks"]) == given.ranks


def test_a_failed_variant_has_no_times_and_still_makes_json():
    failed = VariantResult("stock", within_tolerance=False, error="BackendCompilerFailed: no")
    data = json.loads(json.dumps(failed.to_json(), allow_nan=False))
    assert data["step_ms_median"] == "nan"
    assert VariantResult.from_json(data) == failed


def test_an_unknown_variant_is_named():
    with pytest.raises(KeyError, match="no variant 'theirs'; there are eager, stock, ours"):
        comparison().ranks[0]["theirs"]


def test_table_for_people():
    lines = [line.rstrip() for line in as_text(comparison()).splitlines()]
    assert lines[0].strip() == "forward, 2 ranks, CPU: agree"
    body = "\n".join(
        " | ".join(cell.strip() for cell in line.strip("│").split("│"))
        for line in lines
        if line.startswith("│")
    )
    assert (
        body
        == """\
outputs: max difference to eager |  | 2.00e-07 | 2.00e-07
graph breaks |  | 0 | 0
graphs |  | 1 | 1
collectives launched in a step | 3 | 3 | 3
all_gather | 1 | 1 | 1
all_reduce | 2 | 2 | 2
step, ms (real, CPU), median | 3.00 | 3.00 | 3.00
shortest to longest | 2.00 to 3.00 | 2.00 to 3.00 | 2.00 to 3.00
first step, s (compiles) | 0.5 | 0.5 | 0.5
memory: process RSS, peak | 64 MiB | 64 MiB | 64 MiB
exposed, us (simulated on h100x8), before |  |  | 20
after our passes |  |  | 6"""
    )
