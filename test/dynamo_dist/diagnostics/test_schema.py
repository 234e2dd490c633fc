"""The JSON schema: made from the records, copied to the docs, and true of every report."""

import json
from pathlib import Path

import pytest

from dynamo_dist.diagnostics import RunReport, merge_ranks
from dynamo_dist.diagnostics.records import PlannedStep, PlanRecord, json_schema

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra 'test'")
DOCS = Path(__file__).parents[3] / "docs"
PLAN = PlanRecord("f00", "exact", 3, 9.0, 4.0, 4.0, (PlannedStep("aten.mm", ("R",), ("S0",)),))


@pytest.fixture(scope="module")
def valid():
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema()).validate


def test_the_copy_in_the_docs_is_the_schema():
    assert json.loads((DOCS / "report.schema.json").read_text()) == json_schema(), (
        "python -m dynamo_dist explain --schema > docs/report.schema.json"
    )


def test_reports_are_valid(report, valid):
    valid(json.loads(json.dumps(merge_ranks([report(plans=(PLAN,)), report(rank=2)]).to_json())))
    valid(merge_ranks([RunReport()]).to_json() | {"of a later version": 1})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("differences"),
        lambda data: data.update(schema=2),
        lambda data: data["reports"].clear(),
        lambda data: data["reports"][0].update(rank="0"),
        lambda data: data["reports"][0]["breaks"][0].update(effect="none"),
        lambda data: data["reports"][0]["graphs"][0].update(schema=0),
        lambda data: data["reports"][0]["graphs"][0]["collectives"][0].pop("cause"),
    ],
)
def test_what_is_no_report_is_refused(report, valid, spoil):
    data = json.loads(json.dumps(merge_ranks([report()]).to_json()))
    valid(data)
    spoil(data)
    with pytest.raises(jsonschema.ValidationError):
        valid(data)


def test_a_plan_survives_json(report):
    full = report(plans=(PLAN,))
    assert RunReport.from_json(json.loads(json.dumps(full.to_json()))) == full
