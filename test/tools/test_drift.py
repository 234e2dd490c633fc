"""Committed figures that no machine changes: made again, compared, and told where they have drifted."""

import json

import drift
import pytest
import torch

COMMITTED = {
    "torch": torch.__version__,
    "date": "2026-01-01",
    "rows": [
        {"program": "mlp", "communication_ms": 8.46, "solve_s": 1.5, "ms": 3.0, "launches": 4},
        {"program": "norm", "communication_ms": 1.0, "solve_s": 0.1, "ms": 1.0, "launches": 2},
    ],
}


def again(**changes):
    made = json.loads(json.dumps(COMMITTED))
    made["rows"][0].update(changes)
    return made


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A result of its own, and what making it again gives."""
    (tmp_path / "plan.json").write_text(json.dumps(COMMITTED))
    monkeypatch.setattr(drift, "RESULTS", tmp_path)
    monkeypatch.setattr(drift, "ALL", (drift.Figures("plan", ("plan.py",)),))

    def now(made):
        monkeypatch.setattr(drift, "_made", lambda of: made)
        return tmp_path / "plan.json"

    return now


@pytest.mark.parametrize(
    "changes",
    [{}, {"solve_s": 9.9, "ms": 9.9}, {"communication_ms": 8.46 * (1 + 1e-9)}],
    ids=["equal", "seconds", "a rounding"],
)
def test_what_a_machine_decides_is_no_drift(result, changes):
    result(again(**changes))
    assert drift.main([]) == 0


@pytest.mark.parametrize(
    "changes",
    [{"communication_ms": 8.82}, {"launches": 5}, {"buckets": 1}, {"program": "other"}],
    ids=["modelled time", "count", "new", "name"],
)
def test_drift_fails_and_is_named(result, capsys, changes):
    result(again(**changes))
    assert drift.main([]) == 1
    (key,) = changes
    assert f"rows[0].{key}" in capsys.readouterr().out


def test_a_row_that_is_gone_is_drift(result):
    made = again()
    made["rows"].pop()
    result(made)
    assert drift.main([]) == 1


def test_a_change_that_was_meant_is_written(result):
    path = result(again(communication_ms=7.0))
    assert drift.main(["--write"]) == 0
    assert json.loads(path.read_text())["rows"][0]["communication_ms"] == 7.0


def test_results_of_another_torch_are_left_out(result, capsys):
    path = result(again(launches=5))
    path.write_text(json.dumps({**COMMITTED, "torch": "1.0.0"}))
    assert drift.main([]) == 0
    assert "left out" in capsys.readouterr().err


def test_every_result_named_is_committed():
    assert all(known.committed.exists() for known in drift.ALL)


@pytest.mark.slow
def test_the_quick_part_has_not_drifted():
    assert drift.main(["--quick"]) == 0
