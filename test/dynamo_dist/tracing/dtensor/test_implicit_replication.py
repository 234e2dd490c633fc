"""``with implicit_replication():`` inside and around the compiled function: eager's result or
eager's refusal.
"""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat.dynamo_dtensors import implicit_replication as is_on
from dynamo_dist.torch_compat.dynamo_dtensors import set_implicit_replication

pytestmark = pytest.mark.usefixtures("enabled")
MIXED = r"mixed torch\.Tensor and DTensor"


@pytest.fixture
def row():
    with fake_mesh(4) as made:
        yield made
    assert not is_on()
    set_implicit_replication(False)


def sharded(mesh, requires_grad=False):
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)], src_data_rank=None)
    return x.requires_grad_(requires_grad)


def add(x, plain):
    return x + plain


def add_inside(x, plain):
    with implicit_replication():
        y = x * plain
        if torch.is_grad_enabled():
            y = y + plain
    return y * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside(row, backend):
    plain = torch.randn(8, 8)
    expected = add_inside(sharded(row), plain)
    found = torch.compile(add_inside, backend=backend, fullgraph=True)(sharded(row), plain)
    assert found.placements == expected.placements
    assert torch.equal(found.to_local(), expected.to_local())


def test_gradients_are_eagers(row):
    plain = torch.randn(8, 8)
    eager, traced = sharded(row, True), sharded(row, True)
    add_inside(eager, plain).sum().backward()
    torch.compile(add_inside, backend="aot_eager", fullgraph=True)(traced, plain).sum().backward()
    expected = eager.grad.redistribute(row, traced.grad.placements)
    assert torch.equal(traced.grad.to_local(), expected.to_local())


def test_outside_of_the_context_a_plain_tensor_is_refused(row):
    def after(x, plain):
        with implicit_replication():
            y = x + plain
        return y + plain

    with pytest.raises(RuntimeError, match=MIXED):
        after(sharded(row), torch.randn(8, 8))
    with pytest.raises(Exception, match=MIXED):
        torch.compile(after, backend="aot_eager", fullgraph=True)(sharded(row), torch.randn(8, 8))
    assert not is_on()


def test_what_was_compiled_in_the_context_asks_for_it(row):
    compiled = torch.compile(add, backend="aot_eager", fullgraph=True)
    x, plain = sharded(row), torch.randn(8, 8)
    with implicit_replication():
        expected = add(x, plain)
        assert torch.equal(compiled(x, plain).to_local(), expected.to_local())
    with pytest.raises(Exception, match=MIXED):
        compiled(x, plain)
    with implicit_replication():
        assert torch.equal(compiled(x, plain).to_local(), expected.to_local())


def test_the_switch_is_off_after_a_program_that_fails_inside(row):
    def fails(x, plain):
        with implicit_replication():
            return x + plain[:3]

    with pytest.raises(Exception, match=r"must match|broadcast"):
        torch.compile(fails, backend="aot_eager", fullgraph=True)(sharded(row), torch.randn(8, 8))
    assert not is_on()


def test_the_switch_is_off_after_a_backend_that_fails_inside(row):
    def backend(gm, inputs):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.target(*(arg for arg in node.args if isinstance(arg, bool)))
                raise RuntimeError("no such backend")

    with pytest.raises(Exception, match="no such backend"):
        torch.compile(add_inside, backend=backend)(sharded(row), torch.randn(8, 8))
    assert not is_on()


def test_a_break_inside_leaves_eagers_result(row):
    def program(x, plain):
        with implicit_replication():
            y = x + plain
            torch._dynamo.graph_break()
            return y * plain

    x, plain = sharded(row), torch.randn(8, 8)
    expected = program(x, plain)
    found = torch.compile(program, backend="aot_eager")(x, plain)
    assert torch.equal(found.to_local(), expected.to_local())


@pytest.mark.slow
def test_inductor_keeps_it(row):
    plain = torch.randn(8, 8)
    expected = add_inside(sharded(row), plain)
    found = torch.compile(add_inside, backend="inductor", fullgraph=True)(sharded(row), plain)
    torch.testing.assert_close(found.to_local(), expected.to_local())
