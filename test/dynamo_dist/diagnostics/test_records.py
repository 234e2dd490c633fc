"""Reports as JSON."""

import json

import pytest

from dynamo_dist.diagnostics import RunReport
from inductor_passes.report.figures import GraphsReport


def test_a_report_survives_json(report):
    original = report()
    assert RunReport.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_an_empty_report_survives_json():
    assert RunReport.from_json(json.loads(json.dumps(RunReport().to_json()))) == RunReport()


def test_json_has_the_documented_fields(report):
    data = report().to_json()
    assert data["schema"] == 1
    assert list(data) == [
        "schema",
        "rank",
        "world_size",
        "torch_version",
        "plugin_version",
        "topology",
        "graphs",
        "breaks",
        "recompiles",
        "plans",
        "facts",
    ]
    assert list(data["breaks"][0]) == [
        "kind",
        "reason",
        "user_line",
        "explanation",
        "fix",
        "cause",
        "effect",
        "count",
        "hints",
    ]
    assert list(data["recompiles"][0]) == ["function", "user_line", "guard", "count"]
    assert list(data["facts"][0]) == ["name", "value", "unit", "source"]


def test_unknown_fields_are_ignored(report):
    data = report().to_json()
    data["new"] = 1
    data["breaks"][0]["new"] = 1
    assert RunReport.from_json(data) == report()


def test_another_schema_is_refused(report):
    with pytest.raises(ValueError, match="schema 99, but this version reads schema 1"):
        RunReport.from_json({**report().to_json(), "schema": 99})


@pytest.mark.parametrize("field", ["rank", "graphs", "torch_version"])
def test_a_missing_field_is_named(report, field):
    data = report().to_json()
    del data[field]
    with pytest.raises(ValueError, match=f"cannot be read: KeyError: '{field}'"):
        RunReport.from_json(data)


def test_a_field_of_the_wrong_type_is_refused(report):
    with pytest.raises(ValueError, match="cannot be read: TypeError"):
        RunReport.from_json({**report().to_json(), "breaks": [{"kind": "x"}]})


def test_a_report_of_graphs_alone_says_that_breaks_are_not_known(graph):
    alone = GraphsReport(0, 1, "2.13.0", "0.1.0", "h100x8", (graph(),))
    read = RunReport.from_json(alone.to_json())
    assert read.graphs == alone.graphs and read.breaks == ()
    assert [fact.value for fact in read.facts] == ["not looked at: this plugin was off"]
