"""A program that asks for its rank may be another graph on each: its launches keep their order."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from dynamo_dist.testing import fake_mesh
from inductor_passes.inductor import hooks as attachment
from inductor_passes.inductor.session import graph_passes_only

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def told(monkeypatch):
    """What the passes are told of each graph, by phase."""
    found = {}

    def run_passes(graph, options, *, phase, ranks_differ, **rest):
        found[phase] = ranks_differ
        return upstream(graph, options, phase=phase, ranks_differ=ranks_differ, **rest)

    upstream = attachment.run_passes
    monkeypatch.setattr(attachment, "run_passes", run_passes)
    return found


ASKED = {
    "get_rank": lambda mesh: dist.get_rank(),
    "of a group": lambda mesh: dist.get_rank(mesh.get_group("tp")),
    "rank": lambda mesh: mesh.get_group("tp").rank(),
    "get_local_rank": lambda mesh: mesh.get_local_rank("tp"),
    "get_coordinate": lambda mesh: mesh.get_coordinate()[1],
}
NOT_ASKED = {
    "size": lambda mesh: mesh.size(),
    "world size": lambda mesh: dist.get_world_size(),
    "rank of another": lambda mesh: dist.get_group_rank(mesh.get_group("tp"), 0),
}


@pytest.mark.parametrize("what", [*ASKED, *NOT_ASKED])
def test_forward_and_backward_are_told(what, told):
    read = {**ASKED, **NOT_ASKED}[what]
    with fake_mesh(2, 4, names=("dp", "tp")) as mesh, graph_passes_only():

        def step(x):
            return funcol.all_gather_tensor_autograd(x * read(mesh), 0, (mesh, 1)).sin()

        x = torch.randn(4, 4, requires_grad=True)
        compiled = torch.compile(step, backend="dynamo_dist", fullgraph=True)
        compiled(x).sum().backward()
    assert told == dict.fromkeys(("forward", "backward"), what in ASKED)
