import gzip
import json

import pytest
from hypothesis import given
from small_problems import as_json as values
from small_problems import layers, problems, save

from inductor_passes.errors import ProblemError
from inductor_passes.files import checked
from inductor_passes.schedule.solver.problem import Schedule
from inductor_passes.schedule.solver.problem_file import (
    PROBLEM,
    load_problem,
    problem_of,
    save_schedule,
)


def as_json(problem):
    return json.loads(json.dumps(values(problem)))


def from_json(data):
    return problem_of(checked(data, PROBLEM))


@given(problems())
def test_a_problem_survives_json(problem):
    assert from_json(as_json(problem)) == problem


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_a_problem_survives_a_file(tmp_path, name):
    save(layers(2), tmp_path / name)
    assert load_problem(tmp_path / name) == layers(2)
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_a_schedule_survives_a_file(tmp_path):
    schedule = Schedule((0, 2, 1), ((1, 2),))
    save_schedule(schedule, tmp_path / "s.json")
    written = json.loads((tmp_path / "s.json").read_text())
    assert written == {"order": [0, 2, 1], "buckets": [[1, 2]]}


def broken(change):
    data = as_json(layers(2))
    change(data)
    return data


def edit(node, **values):
    return lambda data: data["nodes"][node].update(values)


# layers(2): 0 and 1 inputs; 2 launch, 3 wait, 4 compute; 5 launch, 6 wait, 7 compute; 8 output.
BAD = {
    "Node 4 names node 99 in 'deps'; there are 9 nodes.": edit(4, deps=[99]),
    "Node 4 names node -1 in 'deps'; there are 9 nodes.": edit(4, deps=[-1]),
    "The dependencies have a cycle: 3 -> 4 -> 3.": edit(3, deps=[2, 4]),
    "Node 4 stands before its dependency 5: nodes must be in program order.": edit(4, deps=[3, 5]),
    "Launch 2 is on unknown group 'z': it has no link table.": edit(2, group="z"),
    "Launch 2 is on unknown group 'a': it has no group size.": lambda d: d["group_size"].pop("a"),
    "Node 4 is of unknown kind 'sleep'; kinds are compute, launch, wait, input, output.": edit(
        4, kind="sleep"
    ),
    "Wait 3 waits for node 0, which is no launch.": edit(3, launch=0),
    "Node 2 is of kind 'launch' but takes 3.0 us of compute.": edit(2, us=3),
    "Node 3 shares the memory of node 5, which is not before it.": edit(3, alias=5),
    "Group 'a' has no link table.": lambda d: d["links"].update(a={}),
    "The link table of all_gather on group 'a' needs two points.": lambda d: d["links"].update(
        a={"all_gather": [[1, 2]]}
    ),
    "The link table of all_gather on group 'a' is not by growing size.": lambda d: d[
        "links"
    ].update(a={"all_gather": [[2, 2], [1, 3]]}),
    "The link table of all_gather on group 'a' has a negative cost.": lambda d: d["links"].update(
        a={"all_gather": [[1, -2], [2, 3]]}
    ),
    "The link table of all_gather on group 'a' has a larger payload that costs less.": (
        lambda d: d["links"].update(a={"all_gather": [[1, 5], [2, 3]]})
    ),
}


# What the schema says: field, value and rule.
ILL_FORMED = {
    "field 'nodes[4].us' is -1, but it must have minimum 0.": edit(4, us=-1),
    "field 'nodes[4].us' is NaN, but it must have type \"number\".": edit(4, us=float("nan")),
    'field \'nodes[4].us\' is "x", but it must have type "number".': edit(4, us="x"),
    "field 'nodes[2].payload' is -5, but it must have minimum 0.": edit(2, payload=-5),
    "field 'nodes[2].payload' is a number of some 401 digits, but it must have type \"integer\".": edit(
        2, payload=10**400
    ),
    "field 'nodes[4].deps[0]' is null, but it must have type \"integer\".": edit(4, deps=[None]),
    "field 'nodes[4].deps[0]' is 1.0, but it must have type \"integer\".": edit(4, deps=[1.0]),
    'field \'nodes[4].alias\' is "x", but it must have type ["integer", "null"].': edit(
        4, alias="x"
    ),
    "field 'nodes[4]' is 7, but it must have type \"object\".": lambda d: d["nodes"].__setitem__(
        4, 7
    ),
    "field 'nodes' is 3, but it must have type \"array\".": lambda d: d.update(nodes=3),
    "field 'compute_stretch' is 0.5, but it must have minimum 1.": lambda d: d.update(
        compute_stretch=0.5
    ),
    "field 'copy_bytes_per_us' is 0, but it must have minimum 1e-09.": lambda d: d.update(
        copy_bytes_per_us=0
    ),
    "field 'group_size.a' is 0, but it must have minimum 1.": lambda d: d["group_size"].update(a=0),
    "field 'links.a.all_gather[0]' is a list of 1, but it must have minItems 2.": lambda d: d[
        "links"
    ].update(a={"all_gather": [[1], [2, 3]]}),
}
LACKING = {
    "nodes[4].deps": lambda d: d["nodes"][4].pop("deps"),
    "nodes[2].group": lambda d: d["nodes"][2].pop("group"),
    "links": lambda d: d.pop("links"),
}


def refusal(change):
    with pytest.raises(ProblemError) as caught:
        from_json(broken(change))
    return str(caught.value)


@pytest.mark.parametrize("message", ILL_FORMED)
def test_a_field_of_another_type_or_range_is_named(message):
    assert refusal(ILL_FORMED[message]).startswith(f"The schedule problem: {message} Correct the")


@pytest.mark.parametrize("field", LACKING)
def test_a_field_that_is_not_there_is_named(field):
    assert refusal(LACKING[field]).startswith(f"The schedule problem lacks the field '{field}'.")


@pytest.mark.parametrize("message", BAD)
def test_bad_problems_are_refused_in_one_line(message):
    assert refusal(BAD[message]) == message


@pytest.mark.parametrize(
    "content", [b"{", b"\x1f\x8bnot gzip", gzip.compress(b"[1,", mtime=0)[:-4], b"\xff\xfe", b""]
)
def test_what_is_not_json_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ProblemError, match=r"p\.json'(:| is) (not JSON|it is not)") as caught:
        load_problem(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProblemError, match=r"Cannot read .*absent\.json': No such file"):
        load_problem(tmp_path / "absent.json")
