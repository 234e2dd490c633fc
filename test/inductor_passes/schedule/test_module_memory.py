"""What FSDP2's runtime would hold of a graph's gathers: a module's at once and the next one's
ahead.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from inductor_passes.graph.collectives import kind, launches
from inductor_passes.schedule.extract import runtime_bytes
from inductor_passes.schedule.schedule_pass import EXTRA_BYTES, ScheduleGraph
from inductor_passes.simulate import simulate
from inductor_passes.testing import FixedCost, trace

c10d = torch.ops._c10d_functional
RANKS, ROWS = 4, 64
WHOLE = ROWS * ROWS * 4  # bytes of one gathered parameter


class FSDPLayer(FSDPModule, nn.Module):
    pass


def gather(shard):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, RANKS, "0"))


def three_layers(x, *shards):
    """Two parameters a layer."""
    for shard in shards:
        x = x @ gather(shard)
    return x


def program(*modules):
    """The graph; each of its gathers was traced in one of these, "" for none."""
    shapes = [[ROWS // RANKS, ROWS]] * len(modules)
    graph = trace(three_layers, [1, ROWS], *shapes, world_size=RANKS)
    for launch, module in zip(launches(graph), modules, strict=True):
        outer = {"0": ("model", FSDPLayer)} if module else {}
        inner = {"1": (module, FSDPLayer), "2": (f"{module}.linear", nn.Linear)} if module else {}
        launch.meta["nn_module_stack"] = outer | inner
    return graph


def extra(graph):
    return runtime_bytes(graph, lambda: simulate(graph, FixedCost()))


def test_a_module_is_whole_with_the_next_one():
    # In program order one parameter is alive; in FSDP2 two layers are.
    assert extra(program("a", "a", "b", "b", "c", "c")) == 3 * WHOLE


def test_a_single_module_is_whole_at_once():
    assert extra(program("a", "a", "a")) == 2 * WHOLE


def test_graphs_without_its_modules_are_not_its():
    assert extra(program("", "", "")) is None


def test_gradients_of_a_module_are_packed():
    def backward(x, y):
        return [
            c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ y, "sum", RANKS, "0")) for _ in "abc"
        ]

    graph = trace(backward, [ROWS, ROWS], [ROWS, ROWS], world_size=RANKS)
    alone = simulate(graph, FixedCost()).peak_bytes
    assert all(kind(launch) == "reduce_scatter" for launch in launches(graph))
    graph = trace(
        lambda x, y, shard: (*backward(x, y), x @ gather(shard)),
        *([ROWS, ROWS], [ROWS, ROWS], [ROWS // RANKS, ROWS]),
        world_size=RANKS,
    )
    for launch in launches(graph):
        launch.meta["nn_module_stack"] = {"1": ("a", FSDPLayer)}
    assert alone < 2 * WHOLE
    # Three gradients and their packed copy, and the parameter, which is gathered first.
    assert extra(graph) >= 4 * WHOLE


def test_the_scheduler_takes_that_much_and_no_more(monkeypatch):
    taken = []

    class Asked(ScheduleGraph):
        def solve(self, problem, *, bucket, extra_bytes, **room):
            taken.append(extra_bytes)
            return super().solve(problem, bucket=bucket, extra_bytes=extra_bytes, **room)

    graph = program("a", "a", "b", "b", "c", "c")
    before = simulate(graph, FixedCost()).peak_bytes
    Asked(FixedCost()).run(graph)
    assert taken[0] == 3 * WHOLE
    assert simulate(graph, FixedCost()).peak_bytes <= before + 3 * WHOLE
    Asked(FixedCost()).run(program("", ""))
    assert taken[-1] == EXTRA_BYTES
