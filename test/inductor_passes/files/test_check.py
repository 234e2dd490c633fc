"""Values against a schema: one line for a fault, and numbers stricter than the standard's."""

import json
import random

import pytest
from fuzzing.file_examples import examples
from fuzzing.file_mutants import mutant

from dynamo_dist.diagnostics.records import schema_of_rank
from dynamo_dist.planning import file as plan_file
from inductor_passes import files
from inductor_passes.cost import importing
from inductor_passes.errors import ProblemError
from inductor_passes.files import MOST
from inductor_passes.schedule.solver import problem_file

SCHEMAS = {
    "problem": problem_file.PROBLEM.schema,
    "profile": importing.PROFILE.schema,
    "plan": plan_file.FORM.schema,
    "report": schema_of_rank(),
}


def refusal(value, schema):
    try:
        files.checked(value, files.Form("file", ProblemError, "", schema))
    except ProblemError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_mutants_are_refused_in_one_line(name):
    schema, text, refused = SCHEMAS[name], examples()[name].text, 0
    assert refusal(json.loads(text), schema) is None
    for number in range(150):
        try:
            value = json.loads(mutant(text, random.Random(f"{name} {number}")))
        except (ValueError, RecursionError):
            continue
        said = refusal(value, schema)
        assert said is None or ("\n" not in said and len(said) < 400), (number, said)
        refused += said is not None
    assert refused > 5


@pytest.mark.parametrize("value", [True, 1.0, 10**18 + 1])
def test_what_is_no_integer(value):
    assert "must have type" in refusal(value, {"type": "integer"})


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), 1e300, 10**400])
def test_what_is_no_number(value):
    assert "must have type" in refusal(value, {"type": "number"})


def test_the_largest_numbers_are_some():
    for value in (MOST, -MOST, float(MOST), 0.5):
        assert refusal(value, {"type": "number"}) is None


UNIONS = {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "object", "required": ["a"]}]}


def test_of_several_options_one_is_told():
    assert refusal({}, UNIONS) == "The file lacks the field 'a'. Add it. "
    assert "the whole file is 1, but it must have minimum 2." in refusal(1, UNIONS)
