import gzip
import json

import pytest
from hypothesis import given
from small_problems import layers, problems

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.json_format import (
    load_problem,
    load_schedule,
    problem_from_json,
    problem_to_json,
    save_problem,
    save_schedule,
)
from inductor_passes.schedule.problem import Schedule


def as_json(problem):
    return json.loads(json.dumps(problem_to_json(problem)))


@given(problems())
def test_a_problem_survives_json(problem):
    assert problem_from_json(as_json(problem)) == problem


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_a_problem_survives_a_file(tmp_path, name):
    save_problem(layers(2), tmp_path / name)
    assert load_problem(tmp_path / name) == layers(2)
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_a_schedule_survives_a_file(tmp_path):
    schedule = Schedule((0, 2, 1), ((1, 2),))
    save_schedule(schedule, tmp_path / "s.json")
    assert load_schedule(tmp_path / "s.json") == schedule


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
    "Node 4 has a negative or infinite cost: 'us' is -1.0.": edit(4, us=-1),
    "Node 4 has a negative or infinite cost: 'us' is nan.": edit(4, us=float("nan")),
    "Node 2 has a negative or infinite cost: 'payload' is -5.": edit(2, payload=-5),
    "Launch 2 is on unknown group 'z': it has no link table.": edit(2, group="z"),
    "Launch 2 is on unknown group 'a': it has no group size.": lambda d: d["group_size"].pop("a"),
    "Node 4 is of unknown kind 'sleep'; kinds are compute, launch, wait, input, output.": edit(
        4, kind="sleep"
    ),
    "Wait 3 waits for node 0, which is no launch.": edit(3, launch=0),
    "Node 2 is of kind 'launch' but takes 3.0 us of compute.": edit(2, us=3),
    "Node 4 has no 'deps'.": lambda d: d["nodes"][4].pop("deps"),
    "Node 4 has a 'us' that does not fit: could not convert string to float: 'x'.": edit(4, us="x"),
    "'a' is not a node id.": edit(4, deps=["a"]),
    "Node 4 has 'x' as 'alias', which is not a node id.": edit(4, alias="x"),
    "Node 3 shares the memory of node 5, which is not before it.": edit(3, alias=5),
    "Node 4 is not a JSON object.": lambda d: d["nodes"].__setitem__(4, 7),
    "The problem has no 'links'.": lambda d: d.pop("links"),
    "'nodes' is not a JSON list.": lambda d: d.update(nodes=3),
    "copy_bytes_per_us is 0.0, not a positive number.": lambda d: d.update(copy_bytes_per_us=0),
    "Group 'a' has 0 ranks.": lambda d: d["group_size"].update(a=0),
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


@pytest.mark.parametrize("message", BAD)
def test_bad_problems_are_refused_in_one_line(message):
    with pytest.raises(ProblemError) as caught:
        problem_from_json(broken(BAD[message]))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "content", [b"{", b"\x1f\x8bnot gzip", gzip.compress(b"[1,", mtime=0)[:-4], b"\xff\xfe", b""]
)
def test_what_is_not_json_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ProblemError, match=r"p\.json is not JSON") as caught:
        load_problem(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProblemError, match=r"Cannot read .*absent\.json: No such file"):
        load_problem(tmp_path / "absent.json")
