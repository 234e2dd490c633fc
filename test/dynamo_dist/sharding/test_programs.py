"""Losses, convolutions and the rest: on all ranks what one device computes, forward and
backward.
"""

import itertools
import runpy
from pathlib import Path

import pytest

from dynamo_dist.numerics import verify
from dynamo_dist.numerics.ranks import split

PROGRAMS = runpy.run_path(str(Path(__file__).parent / "programs.py"))["PROGRAMS"]

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_one_device(ranks, name):
    function, tensors, layouts = PROGRAMS[name]
    for layout in layouts:
        inputs = [
            split(t, ranks, [p], t.is_floating_point())
            for t, p in zip(tensors, layout, strict=True)
        ]
        report = verify(function, inputs)
        assert report.ok, f"{layout}: {report}"


@pytest.mark.parametrize("name", ["mse_loss mean", "conv2d", "average pool", "attention"])
def test_equals_one_device_on_two_mesh_dimensions(grid, name):
    function, tensors, layouts = PROGRAMS[name]
    for first, second in itertools.pairwise(layouts):
        inputs = [
            split(t, grid, placements, True)
            for t, *placements in zip(tensors, first, second, strict=True)
        ]
        report = verify(function, inputs)
        assert report.ok, f"{first} {second}: {report}"
