import runpy
from pathlib import Path

from dynamo_dist.planning.planner import roots
from dynamo_dist.program import Program, Ref, Source

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))
op, LINE, X = problems["op"], problems["LINE"], problems["X"]
LAYER = ("sin", "cos", "tan", "exp", "log")


def layered(layers, between=()):
    steps = [op("first", (Ref(-1),), ["R"], "R")]
    for layer in range(layers):
        for name in (*LAYER, *(between if layer == 2 else ())):
            steps.append(op(name, (Ref(len(steps) - 1),), ["R"], "R"))
    steps.append(op("last", (Ref(len(steps) - 1),), ["R"], "R"))
    return Program(steps, [Source(X, ("R",), True)], [LINE])


def test_inner_layers_are_tied_to_the_second():
    found = roots(layered(5))
    n = len(LAYER)
    assert found[: 1 + 2 * n] == list(range(1 + 2 * n))
    second = list(range(1 + n, 1 + 2 * n))
    assert found[1 + 2 * n : 1 + 4 * n] == [*second, *second]
    assert found[1 + 4 * n :] == list(range(1 + 4 * n, 2 + 5 * n))


def test_two_layers_are_not_tied():
    assert roots(layered(2)) == list(range(12))


def test_a_layer_that_differs_is_not_tied_to_the_others():
    program = layered(6, between=("odd",))
    odd = next(i for i, step in enumerate(program.steps) if step.text == "odd")
    found = roots(program)
    assert found[odd] == odd
    assert all(program.steps[i].text == program.steps[r].text for i, r in enumerate(found))
