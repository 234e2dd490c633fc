import dataclasses
from unittest import mock

import pytest
from small_problems import layers

from inductor_passes.schedule.solver import solve as known


@pytest.fixture
def solved(monkeypatch):
    """The problems that the solver was asked for."""
    asked = []

    def solve(problem, **how):
        asked.append(problem)
        return mock.Mock(name=problem.name)

    monkeypatch.setattr(known, "solve", solve)
    monkeypatch.setattr(known, "_solutions", type(known._solutions)())
    return asked


def renamed(problem):
    nodes = tuple(dataclasses.replace(node, name=f"{node.name}_1") for node in problem.nodes)
    return dataclasses.replace(problem, name="another", nodes=nodes)


def test_an_equal_problem_is_solved_once_whatever_its_names(solved):
    first = known.solve_once(layers(4))
    assert known.solve_once(renamed(layers(4))) is first
    assert len(solved) == 1


@pytest.mark.parametrize(
    "changes",
    [{"bucket": False}, {"extra_memory_bytes": 1}, {"extra_memory_ratio": 0.5}],
)
def test_other_arguments_are_another_solution(solved, changes):
    assert known.solve_once(layers(4)) is not known.solve_once(layers(4), **changes)


@pytest.mark.parametrize(
    "field, value",
    [
        ("compute_stretch", 1.5),
        ("copy_bytes_per_us", 1.0),
        ("group_size", {"a": 2, "b": 3}),
        ("links", {}),
    ],
)
def test_another_price_is_another_problem(field, value):
    assert known.digest(dataclasses.replace(layers(4), **{field: value})) != known.digest(layers(4))


def test_every_number_of_a_node_counts():
    whole = layers(4)
    others = {
        "kind": "output",
        "deps": (),
        "us": 1.5,
        "bytes": 3,
        "alias": 0,
        "group": "b",
        "op": "x",
    }
    others |= {"dtype": "x", "reduce": "sum", "payload": 5, "launch": 0}
    fields = {field.name for field in dataclasses.fields(whole.nodes[0])}
    assert others.keys() == fields - {"name"}
    digests = {known.digest(whole)}
    for name, value in others.items():
        changed = dataclasses.replace(whole.nodes[5], **{name: value})
        nodes = (*whole.nodes[:5], changed, *whole.nodes[6:])
        digests.add(known.digest(dataclasses.replace(whole, nodes=nodes)))
    assert len(digests) == 1 + len(others)


def test_the_latest_are_kept(solved):
    for count in range(2, known.MOST + 4):
        known.solve_once(layers(count))
    known.solve_once(layers(known.MOST + 3))
    assert len(solved) == known.MOST + 2
    known.solve_once(layers(2))
    assert len(solved) == known.MOST + 3
