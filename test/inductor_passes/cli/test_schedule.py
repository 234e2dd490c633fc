import json

import pytest
from small_problems import layers, save

from inductor_passes.__main__ import main
from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.problem import Schedule


@pytest.fixture
def path(tmp_path):
    save(layers(4), tmp_path / "p.json.gz")
    return tmp_path / "p.json.gz"


def test_solves_and_writes(path, tmp_path, capsys):
    assert main(["schedule", str(path), "-o", str(tmp_path / "s.json"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "s.json").read_text())
    evaluated = evaluate(layers(4), Schedule(written["order"], written["buckets"]))
    assert evaluated.makespan_us == printed["makespan_us"] == 50.0
    assert printed["gap"] == 0.0
    assert [(e["name"], e["reason"]) for e in printed["exposed"]] == [("launch", "at the bound")]


def test_prints_for_people(path, capsys):
    assert main(["schedule", str(path)]) == 0
    assert "makespan 50 us (was 80), bound 50, gap 0.00%" in capsys.readouterr().out


def test_names_the_least_memory_where_the_cap_is_too_low(path, capsys):
    arguments = ["--extra-memory-ratio", "-1", "--extra-memory-bytes", "-999999999"]
    assert main(["schedule", str(path), *arguments]) == 0
    assert "is below what any order found needs; the least found is" in capsys.readouterr().out


def test_a_bad_file_is_one_line(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    assert main(["schedule", str(tmp_path / "bad.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
