"""Graphs cut and uncut, on all ranks, with small whole numbers in floats, so that every sum is
exact.
"""

import copy
import operator

import torch
from fuzzing.lockstep import run_in_lockstep
from torch.utils import _pytree as pytree

from inductor_passes.split.cut import Cutter
from inductor_passes.split.region import Positions, spread
from inductor_passes.split.rules.rule import Cut

RANKS = 2


def whole_numbers(shapes, ranks=RANKS, dtype=torch.float64, most=4):
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(-most, most + 1, s, generator=generator).to(dtype) for s in shapes]
        for _ in range(ranks)
    ]


def same(graph, cut, inputs, tolerance=0.0):
    """Both graphs return the same on every rank."""
    expected, got = (run_in_lockstep([g] * len(inputs), inputs) for g in (graph, cut))
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def cut_behind(graph, parts, dim=0, seed=0, outer=1):
    """A cut copy, and the region of it."""
    trial = copy.deepcopy(graph)
    node = trial.find_nodes(op="placeholder")[seed]
    region = spread(Positions(trial), node, Cut(dim, outer), parts)
    steps = [
        (n.target, step.out) for n, step in region.steps.items() if n.target is not operator.getitem
    ]
    Cutter(trial, region).run()
    trial.lint()
    return trial, region, steps
