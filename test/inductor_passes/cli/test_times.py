"""``costs show``: measured beside predicted, worst first, and by how much the topology is off."""

import json

from inductor_passes.__main__ import main
from inductor_passes.machine.times.file import to_text
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime, Times, TunedStep

GRAPH = GraphTimes(
    "forward",
    {"mm": NodeTime("mm", 50.0, 40.0), "relu": NodeTime("relu", 30.0, 0.0)},
    {"gather": LaunchTime("all_gather", 2, 1, 4096, 400.0, 100.0)},
)
TIMES = Times("cpu-gloo 12ab", "2.13", 2, 20, {"abc": GRAPH}, compute_stretch=1.25)


def test_worst_first_and_a_topology_that_lies_is_found_out(tmp_path, capsys):
    path = tmp_path / "times.json"
    path.write_text(to_text(TIMES))
    assert main(["costs", "show", str(path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert [row["name"] for row in table["rows"]] == ["gather", "relu", "mm"]
    assert (table["launch_factor"], table["compute_factor"]) == (4.0, 2.0)
    assert main(["costs", "show", str(path), "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert "launches take 4.00 times what the topology says" in said
    assert "compute takes 1.25 times as long" in said
    assert "gather" in said and "relu" not in said and "and 2 more" in said


def test_a_damaged_table_is_one_line(tmp_path, capsys):
    path = tmp_path / "times.json"
    path.write_text(to_text(TIMES).replace("400.0", "NaN"))
    assert main(["costs", "show", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_changed_because_of_the_costs_is_said(tmp_path, capsys):
    path = tmp_path / "times.json"
    outcome = TunedStep(2000.0, 1500.0, 2.5, ("forward: 3 launches instead of 6",))
    path.write_text(to_text(TIMES, outcome))
    assert main(["costs", "show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "a step took 2.00 ms, and 1.50 ms by these costs; compiling again took 2.5 s" in said
    assert "changed in the schedule, forward: 3 launches instead of 6" in said
    assert main(["costs", "show", str(path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["outcome"]["changes"] == ["forward: 3 launches instead of 6"]
