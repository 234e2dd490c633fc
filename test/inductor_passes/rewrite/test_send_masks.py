"""Masks that are gathered or broadcast stay masks in Inductor's code."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import inductor_passes
from inductor_passes.rewrite.send_masks import send_masks_as_bytes
from inductor_passes.testing import fake_group, trace

c10d = torch.ops._c10d_functional
PROGRAMS = {
    "gathered": lambda mask: c10d.wait_tensor(c10d.all_gather_into_tensor(mask, 2, "0")),
    "broadcast": lambda mask: c10d.wait_tensor(c10d.broadcast(mask, 0, "0")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_are_sent_and_masks_come_back(name):
    def program(x):
        return PROGRAMS[name](x > 0).logical_not()

    with fake_group(2):
        graph = trace(program, [4, 8])
        assert send_masks_as_bytes(graph) == 1
        assert send_masks_as_bytes(graph) == 0
    types = {node.name: node.meta["val"].dtype for node in graph.nodes if "val" in node.meta}
    sent, *_ = (
        node
        for node in graph.nodes
        if node.target in (c10d.all_gather_into_tensor.default, c10d.broadcast.default)
    )
    assert types[sent.name] == torch.uint8 and types["logical_not"] == torch.bool


@pytest.mark.slow
def test_a_gathered_mask_chooses_on_a_cpu():
    def program(mask, x):
        whole = funcol.all_gather_tensor(mask, 0, dist.group.WORLD)
        return torch.where(~whole, 0.0, x), whole

    mask, x = torch.rand(4, 8) > 0.5, torch.randn(8, 8)
    with fake_group(2):
        compiled = torch.compile(program, options=inductor_passes.options(), fullgraph=True)
        found, whole = compiled(mask, x)
    assert whole.dtype == torch.bool and torch.equal(found, torch.where(whole, x, 0.0))
