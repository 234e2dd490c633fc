"""A fingerprint as JSON, and how two of them differ."""

import functools
import json

import pytest

from dynamo_dist.saved.fingerprint import differences, of_options, of_process, plain
from inductor_passes.pass_options import split


def test_a_process_is_the_same_as_itself():
    facts = of_process()
    assert list(differences(facts, json.loads(json.dumps(plain(facts))))) == []
    assert {"torch", "python", "sources", "plugins", "job", "cpu", "gpus"} <= set(facts)


@pytest.mark.parametrize(
    ("then", "now", "lines"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c: 2 -> 3"]),
        ({"a": 1}, {}, ["a: 1 -> none"]),
        ({"a": {"b": 1}}, {"a": "off"}, ['a: {"b": 1} -> off']),
        ({"a": ["x"]}, {"a": []}, ['a: ["x"] -> []']),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_differences(then, now, lines):
    assert list(differences(then, now)) == lines


def test_options_that_change_graphs():
    own, inductor = split({"schedule": {"effort": "high"}, "report": "out", "max_autotune": True})
    facts = of_options(own, inductor)
    assert facts["schedule"]["effort"] == "high" and facts["inductor"] == {"max_autotune": True}
    assert not {"report", "compile"} & set(facts)


def test_objects_are_named_without_their_address():
    facts = of_options(split({})[0], {"a": len, "b": functools.partial(len)})
    assert facts["inductor"] == {"a": "builtins.len", "b": "functools.partial"}
