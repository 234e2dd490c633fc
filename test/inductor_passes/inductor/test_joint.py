"""Joint graphs cut before AOTAutograd makes forward and backward of them: what is saved stays in
parts.
"""

import pytest
import torch

from inductor_passes import PassOptions, options
from inductor_passes.graph.collectives import launches
from inductor_passes.inductor.graph_module import capturing
from inductor_passes.inductor.options import taken_off
from inductor_passes.pipeline import run_passes
from inductor_passes.ranks.decision import half_of
from inductor_passes.testing import fake_group

c10d, aten = torch.ops._c10d_functional, torch.ops.aten


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))

    @staticmethod
    def backward(ctx, grad):
        return c10d.wait_tensor(c10d.all_reduce(grad, "sum", "0"))


def step(x, a, b):
    return Reduced.apply(Reduced.apply(x @ a).sin() @ b).cos()


def captured(split, train=True, **more):
    torch.compiler.reset()
    patches = options(split=split, topology="h100x8", **more)
    with fake_group(8), capturing(patches) as (backend, found):
        given = [torch.rand(512, 512, requires_grad=train) for _ in range(3)]
        torch.compile(step, backend=backend, fullgraph=True)(*given)
        graphs = {each.phase: each.graph for each in found}
        records = {
            phase: run_passes(graph, PassOptions(extra={"split": split}, **more))
            for phase, graph in graphs.items()
        }
    return graphs, records


def test_forward_and_backward_have_the_same_chunks():
    whole, _ = captured("off")
    graphs, records = captured(2)
    for phase, graph in graphs.items():
        assert len(launches(graph)) > len(launches(whole[phase]))
        skipped = next(p for p in records[phase].passes if p.name == "split_regions")
        assert skipped.status == "skipped" and "joint graph was cut" in skipped.reason
    forward, backward = graphs["forward"], graphs["backward"]
    assert half_of(forward) == half_of(backward) and half_of(forward).is_cut
    assert half_of(forward).record.split.parts == 2
    saved = forward.output_node().args[0][1:]
    assert not any(node.target is aten.cat.default for node in saved)
    assert any(512 * 256 == node.meta["val"].numel() for node in saved)


def test_what_is_not_trained_is_cut_later():
    graphs, records = captured(2, train=False)
    assert half_of(graphs["inference"]) is None
    assert records["inference"].split.parts == 2


@pytest.mark.parametrize("more", [{"exact": True}, {"disable": ["split_regions"]}])
def test_who_cuts_nothing_later_cuts_no_joint_graph(more):
    graphs, _ = captured(2, **more)
    assert half_of(graphs["forward"]) is None and len(launches(graphs["forward"])) == 2


def test_a_pass_of_the_user_runs_first_and_is_given_back():
    seen = []

    def theirs(graph):
        seen.append(len(launches(graph)))

    given = options(split=2, joint_custom_post_pass=theirs)
    given["joint_custom_post_pass"].attachment.chain_joint(torch.fx.Graph())
    assert seen == [0]
    own, left = taken_off(given)
    assert own.extra == {"split": 2} and left["joint_custom_post_pass"] is theirs
