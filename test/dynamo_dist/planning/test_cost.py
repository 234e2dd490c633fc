import runpy
from pathlib import Path

import pytest

from dynamo_dist.planning.cost import Costs, is_matmul, is_view, local_shape
from dynamo_dist.program import Program, Value

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))
LINE, SQUARE, Prices = problems["LINE"], problems["SQUARE"], problems["Prices"]
X = Value((64, 64), "float32", 4)  # 16 KiB


def costs(mesh):
    return Costs(Program([], [], [mesh]), Prices())


@pytest.mark.parametrize(
    ("source", "target", "us"),
    [
        ("R", "S0", 0),
        ("S0", "S0", 0),
        ("S0", "R", 10 + 3 * 4),
        ("P", "R", 10 + 2 * 16),
        ("P", "S1", 10 + 16),
        ("S0", "S1", 10 + 4),
        ("S0", "P", float("inf")),
        ("R", "P", 0),
    ],
)
def test_moves_on_a_line(source, target, us):
    assert costs(LINE).move_us(X, (source,), (target,), 0) == us


def test_inner_shard_of_a_changing_outer_one_is_gathered_first():
    """S0 S0 -> R S0: gather 4 x 2 KiB, gather 2 x 8 KiB, and cut again."""
    assert costs(SQUARE).move_us(X, ("S0", "S0"), ("R", "S0"), 0) == 10 + 3 * 2 + 10 + 8


def test_dimensions_of_a_mesh_add_up():
    moved = costs(SQUARE).move_us(X, ("P", "S1"), ("R", "S0"), 0)
    assert moved == (10 + 4) + (10 + 2 * 4)


def test_local_shapes_round_up():
    assert local_shape(Value((5, 8), "float32", 4), ("S0", "S0"), SQUARE) == (1, 8)
    assert local_shape(X, ("S0", "S1"), SQUARE) == (32, 16)


def test_kinds_of_operations():
    assert is_matmul("aten.mm.default(*, *)") and not is_matmul("aten.mul.Tensor(*, *)")
    assert is_view("aten.view.default(*, [2])") and not is_view("aten.clone.default(*)")
    assert not is_view("redistribute")
