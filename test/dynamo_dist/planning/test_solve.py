import itertools
import runpy
import sys
from pathlib import Path

import pytest

from dynamo_dist.planning.cost import Costs
from dynamo_dist.planning.solve import PlacementProblem, improve, solve_placements
from dynamo_dist.program import Choice, Program, Ref, Source, upstream_choice

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))
chain, op, LINE, Prices, X = (problems[n] for n in ("chain", "op", "LINE", "Prices", "X"))
FOLLOW = [Choice(((w,),), ((w,),)) for w in ("R", "S0", "S1")]
ADD = [Choice(((w,), (w,)), ((w,),)) for w in ("R", "S0", "S1", "P")]


def problem(program, roots=None):
    choices = []
    for step in program.steps:
        more = [] if step.fixed else ADD if len(step.inputs) == 2 else FOLLOW
        upstream = upstream_choice(step)
        choices.append([upstream, *(c for c in more if c != upstream)])
    roots = roots or range(len(program.steps))
    return PlacementProblem(program, choices, roots, Costs(program, Prices()))


def by_hand(p):
    """The least cost of all combinations."""
    return min(sum(p.total_us(c)) for c in itertools.product(*p.choices))


def test_a_chain_that_upstream_gathers_stays_sharded():
    p = problem(chain(3))
    upstream = [upstream_choice(step) for step in p.program.steps]
    solution = solve_placements(p, upstream)
    assert p.total_us(upstream)[0] > 0
    assert p.total_us(solution.chosen) == (0, 0)
    assert solution.method == "integer programme"
    assert solution.bound_us == 0


def diamond(sources):
    """Two sources, a sum, two readers of it that differ, and a product of them."""
    steps = [
        op("aten.add.Tensor(*, *)", (Ref(-1), Ref(-2)), ["R", "R"], "R"),
        op("aten.sin.default(*)", (Ref(0),), ["R"], "R"),
        op("aten.cos.default(*)", (Ref(0),), ["R"], "R"),
        op("aten.mul.Tensor(*, *)", (Ref(1), Ref(2)), ["R", "R"], "R"),
        op("pinned", (Ref(3),), ["S1"], "S1", fixed=True),
    ]
    return Program(steps, [Source(X, (word,), True) for word in sources], [LINE])


@pytest.mark.parametrize("sources", itertools.product(["R", "S0", "S1", "P"], repeat=2))
def test_program_finds_the_least_cost_above_its_bound(sources):
    p = problem(diamond(sources))
    upstream = [upstream_choice(step) for step in p.program.steps]
    solution = solve_placements(p, upstream)
    least = by_hand(p)
    assert sum(p.total_us(solution.chosen)) == pytest.approx(least)
    assert solution.bound_us <= least + 1e-6


@pytest.mark.parametrize("sources", [("S0", "S1"), ("P", "P"), ("R", "S0")])
def test_greedy_is_never_worse_than_upstream(sources):
    p = problem(diamond(sources))
    upstream = [upstream_choice(step) for step in p.program.steps]
    assert sum(p.total_us(improve(p, upstream))) <= sum(p.total_us(upstream))


def test_without_scipy_choices_are_improved_one_at_a_time(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    p = problem(chain(1))
    upstream = [upstream_choice(step) for step in p.program.steps]
    solution = solve_placements(p, upstream)
    assert solution.method == "greedy"
    assert p.total_us(solution.chosen) == (0, 0)


def test_what_is_written_in_place_is_not_moved():
    program = chain(2)
    program.steps[1] = op("aten.sin_.default(*)", (Ref(0),), ["R"], "R", in_place=True)
    p = problem(program)
    assert p.move_us(1, 0, ("R",), ("S0",)) == float("inf")
    chosen = solve_placements(p, [upstream_choice(step) for step in program.steps]).chosen
    assert chosen[0].outputs[0] == chosen[1].inputs[0] == ("S0",)


def test_tied_steps_choose_alike():
    p = problem(chain(5), roots=[0, 1, 1, 1, 4, 5])
    upstream = [upstream_choice(step) for step in p.program.steps]
    chosen = solve_placements(p, upstream).chosen
    assert chosen[1] == chosen[2] == chosen[3]
    assert p.total_us(chosen) == (0, 0)
