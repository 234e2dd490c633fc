"""The cost model of a graph is made once, whoever asks it: key, passes, simulation, report,
pinning.
"""

import collections
import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from inductor_passes.cost import model
from inductor_passes.inductor.session import compile_with_passes, graph_passes_only
from inductor_passes.schedule import schedule_pass
from inductor_passes.testing import fake_group


def step(x, first, second):
    first = funcol.all_gather_tensor(first, 0, dist.group.WORLD)
    second = funcol.all_gather_tensor(second, 0, dist.group.WORLD)
    return funcol.all_reduce((x @ first) @ second, "sum", dist.group.WORLD) + x @ x


@pytest.fixture
def made(monkeypatch):
    """How often each was made."""
    counts = collections.Counter()

    def counted(owner, name, what):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(model.TopologyCostModel, "__init__", "models")
    counted(model.Machine, "__init__", "machines")
    counted(model._Analysis, "__init__", "analyses")
    counted(schedule_pass, "extract", "problems")
    return counts


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_graph_one_model(made):
    torch._dynamo.reset()
    options = {"topology": "h100x8", "disable": ["bucket_gathers"]}
    with fake_group(8), torch.no_grad(), graph_passes_only():
        compiled = torch.compile(step, backend=compile_with_passes, options=options)
        # Torch 2.11 cannot run a graph that is pinned without lowering it.
        with contextlib.suppress(NotImplementedError):
            compiled(torch.ones(512, 512), torch.ones(64, 512), torch.ones(64, 512))
    # Analysed: the program's graph, the schedule on trial, and the graph that is left. Pinning asks
    # the last.
    assert made == {"models": 1, "machines": 1, "problems": 1, "analyses": 3}
