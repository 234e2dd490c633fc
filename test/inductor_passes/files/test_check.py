"""Our checker says what the library of the standard says, but for numbers, where it is stricter."""

import functools
import json
import math
import random

import jsonschema
import pytest
from fuzzing.file_examples import examples
from fuzzing.file_mutants import mutant

from dynamo_dist.reporting.schema import schema_of_rank
from dynamo_dist.sharding.plan import file as plan_file
from inductor_passes import files
from inductor_passes.errors import ProblemError
from inductor_passes.files.check import MOST
from inductor_passes.machine.importing import kineto
from inductor_passes.schedule.model import json_format

SCHEMAS = {
    "problem": json_format.PROBLEM.schema,
    "profile": kineto.PROFILE.schema,
    "plan": plan_file.FORM.schema,
    "report": schema_of_rank(),
}


def _is_integer(_, value):
    return type(value) is int and abs(value) <= MOST


def _is_number(_, value):
    whole = type(value) is int
    return (whole or (type(value) is float and math.isfinite(value))) and abs(value) <= MOST


@functools.cache
def library():
    """The standard, with our idea of a number."""
    types = jsonschema.Draft202012Validator.TYPE_CHECKER
    types = types.redefine("integer", _is_integer).redefine("number", _is_number)
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)


def refusal(value, schema):
    try:
        files.checked(value, files.Form("file", ProblemError, "", schema))
    except ProblemError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_says_what_the_library_says(name):
    schema, text = SCHEMAS[name], examples()[name].text
    validator, refused = library()(schema), 0
    assert refusal(json.loads(text), schema) is None
    for number in range(150):
        try:
            value = json.loads(mutant(text, random.Random(f"{name} {number}")))
        except (ValueError, RecursionError):
            continue
        said = refusal(value, schema)
        assert (said is None) == validator.is_valid(value), (number, said)
        refused += said is not None
    assert refused > 5


UNIONS = {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "object", "required": ["a"]}]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "The file: the whole file is \"x\", but it must be a whole number or an object. Correct the file. "),
        ({}, "The file lacks the field 'a'. Add it. "),
        (True, "The file: the whole file is true, but it must be a whole number or an object. Correct the file. "),
    ],
)  # fmt: skip
def test_of_several_options_the_one_that_went_furthest_is_told(value, said):
    assert refusal(value, UNIONS) == said


def test_bounds_and_lengths():
    schema = {"type": "array", "maxItems": 2, "items": {"type": "number", "exclusiveMinimum": 0}}
    assert refusal([0.5, 1], schema) is None
    assert "field '[1]' is 0, but it must be a number above 0" in refusal([1, 0], schema)
    assert "a list of 3, but it must have at most 2 entries" in refusal([1, 1, 1], schema)
    assert "1e+300, but it must be a number of at most 1e+18" in refusal([1e300], schema)
