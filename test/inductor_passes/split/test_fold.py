"""Equal layers once: what is left out, that shapes still agree, and that the choice is that of
the whole graph.
"""

import pytest
import torch

from inductor_passes.pipeline import run_pass
from inductor_passes.split.price import FIRST, LAST, fold
from inductor_passes.split.split_pass import SplitRegions
from inductor_passes.testing import FixedCost, trace

c10d = torch.ops._c10d_functional


def reduced(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def layer(x, up, down):
    """A Megatron block: two products, a sum over ranks, and what surrounds them."""
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)
    hidden = torch.nn.functional.silu(wide @ up).cos().sin().exp()
    return x + reduced(hidden @ down)


def forward(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = layer(x, up, down)
    return x


def training(x, *weights):
    given = [x.requires_grad_(), *(w.requires_grad_() for w in weights)]
    return list(torch.autograd.grad(forward(*given).sum(), given))


class ByRows(FixedCost):
    """Half the rows take half the time."""

    def compute_us(self, node):
        return 10.0 * node.meta["val"].shape[0] if "mm" in str(node.target) else 0.0

    def launch_us(self, launch):
        return 10.0 * launch.meta["val"].shape[0]

    def link_us(self, launch, payload_bytes):
        return sum(payload_bytes) / 32 * 10.0


def traced(fn, layers):
    graph = trace(fn, [4, 8], *[[8, 8]] * (2 * layers))
    graph.eliminate_dead_code()
    return graph


@pytest.mark.parametrize("fn", [forward, training])
@pytest.mark.parametrize("layers", [16, 24])
def test_every_depth_folds_to_the_same_graph_whose_shapes_agree(fn, layers):
    graph = traced(fn, layers)
    before = str(graph)
    folded = fold(graph)
    assert str(graph) == before
    folded.graph.lint()
    # The first and the last layer may look unlike the others.
    assert layers - 2 <= folded.layers <= layers and folded.kept == FIRST + LAST
    assert len(folded.graph.nodes) == len(fold(traced(fn, 12)).graph.nodes)
    for node in folded.graph.nodes:
        whole = folded.whole.get(node)
        if whole is not None:
            assert node.target == whole.target or node.op == "placeholder"
            for mine, its in zip(node.all_input_nodes, whole.all_input_nodes, strict=True):
                a, b = mine.meta["val"], its.meta["val"]
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_few_layers_and_layers_unlike_each_other_are_left_alone():
    graph = traced(forward, 6)
    assert fold(graph).graph is graph
    sizes = [[8 + i, 8 + i + 1] for i in range(20)]

    def chain(x, *weights):
        for weight in weights:
            x = x @ weight
        return x

    graph = trace(chain, [4, 8], *sizes)
    assert fold(graph).graph is graph


def test_deep_graph_is_split_by_a_choice_on_few_layers():
    record = run_pass(SplitRegions(ByRows(), "auto"), traced(forward, 20))
    split = record.split
    assert split.layers_tried == FIRST + LAST < split.layers
    assert split.launches == 20  # of all layers
    assert split.tried[0].launches < 20
    assert f"({split.layers_tried} of {split.layers} equal layers)" in record.notes[0]
    shallow = run_pass(SplitRegions(ByRows(), "auto"), traced(forward, 4)).split
    assert split.parts == shallow.parts
