"""The limit: never above a makespan, in whatever order and whatever parts."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import problems

from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.lower_bound import limit_us
from inductor_passes.schedule.solver.problem import Problem, program_order
from inductor_passes.schedule.solver.solve import solve


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_order_is_shorter(problem):
    assert limit_us(problem) <= evaluate(problem, program_order(problem)).makespan_us * (1 + 1e-9)
    assert limit_us(problem) <= solve(problem).makespan_us * (1 + 1e-9)


def in_parts(problem, parts):
    """Everything in parts, each with its share of the work, and launches with the whole floor of
    their tables.
    """
    nodes = []
    for node in problem.nodes:
        for part in range(parts):
            at = [d * parts + part for d in node.deps]
            nodes.append(
                dataclasses.replace(
                    node,
                    name=f"{node.name} {part}",
                    deps=tuple(at),
                    us=node.us / parts,
                    bytes=node.bytes // parts,
                    payload=-(-node.payload // parts),
                    alias=None if node.alias is None else node.alias * parts + part,
                    launch=None if node.launch is None else node.launch * parts + part,
                )
            )
    return Problem(
        **{
            **{f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)},
            "nodes": tuple(nodes),
        }
    )


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([2, 3]))
def test_no_cut_is_shorter(problem, parts):
    cut = in_parts(problem, parts)
    assert limit_us(problem) <= solve(cut).makespan_us * (1 + 1e-9)
