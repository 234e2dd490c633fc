"""Whole models, traced, scheduled, and run on all eight ranks: every rank keeps its numbers."""

import dataclasses
import functools
import importlib
import logging

import pytest
import torch

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.graph.collectives import launches
from inductor_passes.inductor.graph_module import capturing
from inductor_passes.pipeline import run_pass
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.testing import fake_group, run_on_ranks

RANKS = 8
NOTHING_TO_GAIN = {"hybrid"}  # a chain: each collective waits for the one before
SMALLER = {"WIDTH": 64, "HIDDEN": 128, "TOKENS": 32, "WORDS": 256}
PROGRAMS = (
    "tensor_parallel",
    "weights_only",
    "weights_only_sequence",
    "sharded_data_parallel",
    "hybrid",
    "clip_gradients",
    "experts",
    "redistributes",
)


def dear_starts():
    """A machine on which merging pays almost always."""
    plain = load_topology("cpu-gloo")
    protocols = tuple(dataclasses.replace(p, launch_us=1e3) for p in plain.protocols)
    return TopologyCostModel(
        dataclasses.replace(plain, protocols=protocols, all_reduce_in_node=None)
    )


def schedulers():
    """With buckets of everything, where sums may be added in another order; and keeping every
    bit.
    """
    yield ScheduleGraph(dear_starts()), {}
    yield ScheduleGraph(dear_starts(), exact=True), {"rtol": 0, "atol": 0}


def value(like, generator):
    """One rank's input: small whole numbers index any table of these models."""
    if like.dtype.is_floating_point:
        return (torch.rand(like.shape, generator=generator) + 0.5).to(like.dtype)
    most = 2 if like.dtype == torch.bool else 8
    return torch.randint(most, like.shape, generator=generator).to(like.dtype)


def inputs(graph):
    """Local values of every rank; the same for equal graphs."""
    generator = torch.Generator().manual_seed(0)
    likes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return [[value(like, generator) for _ in range(RANKS)] for like in likes]


def keep_tensors(graph):
    """Meshes are inputs, and kept for backward, but no node computes with one; gradients may be
    absent.
    """
    output = graph.output_node()
    meshes = graph.find_nodes(op="placeholder")
    meshes = [node for node in meshes if not isinstance(node.meta["val"], torch.Tensor)]
    output.args = ([value for value in output.args[0] if value not in (None, *meshes)],)
    for mesh in meshes:
        graph.erase_node(mesh)


@pytest.fixture(scope="module")
def zoo(pytestconfig):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(pytestconfig.rootpath / "tools" / "bench"))
        module = importlib.import_module("zoo")
        for name, size in SMALLER.items():
            patch.setattr(module, name, size)
        assert tuple(module.ZOO) == PROGRAMS
        yield module.ZOO


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_rank_keeps_its_numbers(zoo, name):
    logging.disable(logging.WARNING)
    torch.compiler.reset()
    try:
        with fake_group(RANKS), capturing() as (backend, captured):
            zoo[name](functools.partial(torch.compile, backend=backend, fullgraph=True))
            changed = 0
            for graph in [c.graph for c in captured if launches(c.graph)]:
                keep_tensors(graph)
                before = run_on_ranks(graph, *inputs(graph))
                for scheduler, tolerance in schedulers():
                    copy = torch.fx.Graph()
                    copy.output(copy.graph_copy(graph, {}))
                    changed += run_pass(scheduler, copy).changed
                    after = run_on_ranks(copy, *inputs(copy))
                    torch.testing.assert_close(after, before, equal_nan=True, **tolerance)
            assert changed or name in NOTHING_TO_GAIN
    finally:
        logging.disable(logging.NOTSET)
