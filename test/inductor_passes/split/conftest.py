import sys
from pathlib import Path

import pytest
import torch

from inductor_passes.testing import fake_group, trace

sys.path.insert(0, str(Path(__file__).parent))

from cutting import RANKS, cut_behind, same, whole_numbers


@pytest.fixture
def in_parts():
    """``in_parts(fn, *shapes)``: what was cut, how it lies, and the region; the same numbers on
    every rank.
    """

    def check(
        fn, *shapes, parts=2, dim=0, outer=1, tolerance=0.0, dtype=torch.float64, inputs=None
    ):
        with fake_group(RANKS):
            graph = trace(fn, *shapes, dtype=dtype)
            graph.eliminate_dead_code()
            cut, region, steps = cut_behind(graph, parts, dim, outer=outer)
            same(graph, cut, inputs or whole_numbers(shapes, dtype=dtype), tolerance)
        return steps, region

    return check
