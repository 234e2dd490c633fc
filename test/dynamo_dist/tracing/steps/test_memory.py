"""What a whole step keeps from forward to backward, no more than two graphs of their own would; and
its stages in the report."""

import operator

import pytest
import torch
import whole_step
from torch import nn
from torch._dynamo.utils import get_static_address_type
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from inductor_passes.graph.phases import STAGES, computes_again, phase_of
from inductor_passes.report import recorder
from inductor_passes.report.figures import titled
from inductor_passes.torch_compat.nodes import overload_packet

pytestmark = pytest.mark.usefixtures("enabled")
aten = torch.ops.aten


def graph_of(step, *inputs):
    """The graph of a compiled step, as it comes to the passes, and what the step returns."""
    graphs = []
    options = {"post_grad_custom_pre_pass": lambda graph: graphs.append(graph.__deepcopy__({}))}
    compiled = torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)
    result = compiled(*inputs)
    (graph,) = graphs
    return list(graph.nodes), result


def crossing(nodes, phase):
    """Bytes of what is computed before a backward and read behind its begin."""
    return sum(
        node.meta["val"].nbytes
        for node in nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and isinstance(node.meta.get("val"), torch.Tensor)
        and phase_of([node]) < phase
        and any(phase_of([user]) >= phase for user in node.users if user.op != "output")
    )


def copies(nodes):
    return [overload_packet(node.target) for node in nodes if computes_again(node)]


class Gated(nn.Module):
    """Its activations are cheap to compute again from two products."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def trained(model, chunks=1):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        for part in x.chunk(chunks):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_activations_are_computed_again_from_products():
    nodes, _ = graph_of(trained(Gated()), torch.randn(128, 64))
    assert aten.exp in copies(nodes)
    # Two products, and what goes into the last one and comes out of it.
    assert crossing(nodes, 1) == 4 * 128 * 64 * 4


def test_each_of_several_backwards_computes_its_own():
    nodes, _ = graph_of(trained(Gated(), chunks=2), torch.randn(128, 64))
    for phase, count in enumerate((0, 1, 1)):
        assert copies([n for n in nodes if phase_of([n]) == phase]).count(aten.exp) == count


def test_checkpoint_computes_products_again():
    model = Gated()

    def step(x):
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
        return loss

    nodes, _ = graph_of(step, torch.randn(128, 64))
    assert copies(nodes).count(aten.mm) == 3  # as in a backward graph of its own


def test_dropout_in_a_checkpoint_drops_the_same_in_backward():
    weight = nn.Parameter(torch.rand(64, 64) + 1)

    def step(x):
        def dropped(x):
            return nn.functional.dropout((x * weight).sin().asin(), 0.5)

        out = checkpoint(dropped, x, use_reentrant=False)
        out.sum().backward()
        return out

    _, out = graph_of(step, torch.ones(64, 64) / 4)
    assert 0.3 < (out == 0).float().mean() < 0.7
    torch.testing.assert_close(weight.grad * weight, out.detach())


def test_numbers_are_those_of_eager_mode():
    def build():
        torch.manual_seed(0)
        model = Gated().double()
        return tuple(model.parameters()), trained(model, chunks=2)

    inputs = [torch.randn(rows, 64, dtype=torch.float64) for rows in (8, 12, 20)]
    whole_step.compare(build, inputs, graphs=2)  # the second for all sizes


def test_a_report_tells_stages_apart(mesh):
    model = Gated()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    records = []
    end = recorder.subscribe(records.append)
    graph_of(trained(model), torch.randn(128, 64))
    end()
    (record,) = records
    figures = {figure.name: figure.value for figure in record.figures}
    spans = [span for span in record.after.spans if span.lane == "compute"]
    assert sum(figures[stage] for stage in STAGES) == pytest.approx(
        sum(span.duration_us for span in spans)
    )
    assert titled(records) == [("training step", record)]
    first = {stage: [s.stage for s in spans].index(stage) for stage in STAGES}
    assert sorted(STAGES, key=first.get) == list(STAGES)


def test_states_stay_where_cuda_graphs_find_them():
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="dynamo_dist", fullgraph=True)
    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.randn(4, 64))
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert [get_static_address_type(each) for each in states] == ["unguarded"] * 9
