"""``dynamo_dist.compare`` for real: one process, two gloo ranks, and a rank that dies."""

import json
import os
import socket
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

import dynamo_dist
from dynamo_dist.errors import CompareError
from inductor_passes.testing import fake_group

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "compare_worker.py"


def run_ranks(out, how, timeout_s):
    """Exit codes and results of two ranks; both are gone when this returns."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(forked.Script(WORKER, out, how, env=environment, together=out / f"{rank}.log"))
    try:
        codes = [process.wait(timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    files = [out / f"{rank}.json" for rank in range(2)]
    return codes, [json.loads(f.read_text()) if f.exists() else None for f in files]


def test_two_ranks_get_one_result(tmp_path):
    codes, results = run_ranks(tmp_path, "live", 300)
    assert codes == [0, 0]
    first, second = results
    assert first["merged"] == second["merged"] and first["ranks"] == second["ranks"]
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    assert first["ok"] and first["backward"] and first["world_size"] == 2
    for name in ("stock", "ours"):
        merged = first["merged"][name]
        assert merged["max_output_diff"] < 1e-5 and merged["max_grad_diff"] < 1e-5
        assert (merged["graphs"], merged["graph_breaks"]) == (1, 0)
        # One sum of partial outputs; the input needs no gradient.
        assert merged["launches"] == first["merged"]["eager"]["launches"] == {"all_reduce": 1}
        assert len(merged["step_ms"]) == 2 and merged["step_ms_median"] > 0
    simulated = first["merged"]["ours"]["simulated"]
    assert simulated["topology"] == "h100x8"
    assert 0 < simulated["exposed_us_after"] <= simulated["exposed_us_before"]
    for result in results:
        assert result["same"] and not result["enabled"]


def test_a_rank_that_dies_is_named(tmp_path):
    codes, results = run_ranks(tmp_path, "die", 300)
    assert codes == [0, 3] and results[1] is None
    assert "failed on rank 0 while running stock" in results[0]["error"]
    assert "No sign of rank 1" in results[0]["error"]


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, scale=1.0):
        return {"y": self.norm(self.linear(x)) * scale}


def test_one_process_without_a_group():
    model = Drops()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dynamo_dist.enable()
    try:
        found = dynamo_dist.compare(model, {"x": torch.randn(4, 8), "scale": 2.0}, steps=2)
        assert dynamo_dist.is_enabled()
    finally:
        dynamo_dist.disable()
    assert found.ok and found.world_size == 1 and found.merged["ours"].launches == {}
    assert found.merged["ours"].simulated is None
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert "forward and backward, 1 rank, CPU: agree" in str(found)


def test_a_wrong_backend_does_not_agree(monkeypatch):
    def off_by_one(gm, inputs, **kwargs):
        return lambda *args: [out + 1 for out in gm(*args)]

    monkeypatch.setattr(
        "dynamo_dist.benchmark.variants.BACKENDS", {"stock": "eager", "ours": off_by_one}
    )
    found = dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)
    assert not found.ok and found.merged["stock"].within_tolerance
    assert found.merged["ours"].max_output_diff == 1.0
    assert "DIFFER" in str(found)


def test_what_stock_cannot_do_is_shown_and_what_ours_cannot_is_raised(monkeypatch):
    def fails(gm, inputs, **kwargs):
        raise ValueError("cannot compile this")

    backends = "dynamo_dist.benchmark.variants.BACKENDS"
    monkeypatch.setattr(backends, {"stock": fails, "ours": "eager"})
    with fake_group(2):
        found = dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)
    assert "cannot compile this" in found.merged["stock"].error and found.ok
    monkeypatch.setattr(backends, {"stock": "eager", "ours": fails})
    with pytest.raises(CompareError, match=r"(?s)while running ours, on rank 0: .*cannot compile"):
        dynamo_dist.compare(lambda x: x * 2, torch.ones(3), steps=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "compare() got steps=0"),
        ({"backward": True}, "hold no tensor that a gradient can start from"),
    ],
)
def test_bad_arguments_say_what_to_do(given, message):
    with pytest.raises(CompareError) as caught:
        dynamo_dist.compare(lambda x: x * 2, torch.ones(3), **given)
    assert message in str(caught.value)
