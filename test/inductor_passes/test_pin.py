import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.inductor.hooks import Attachment
from inductor_passes.order_pinning import pin_order
from inductor_passes.pass_options import PassOptions
from inductor_passes.testing import FixedCost, dump, fake_group, trace
from inductor_passes.torch_compat import inductor as inductor_compat

c10d = torch.ops._c10d_functional


def pinned_target(node):
    """The operation a pinned node holds; the node's own target if it is not pinned."""
    if not inductor_compat.can_pin_order() or node.op != "call_function":
        return node.target
    from torch._inductor.fx_passes.control_dependencies import control_deps

    if node.target is not control_deps:
        return node.target
    holder = node.args[1]
    subgraph = getattr(node.graph.owning_module, str(holder.target))
    return next(n.target for n in subgraph.graph.nodes if n.op == "call_function")


def prefetched(x, v, w):
    a = c10d.all_gather_into_tensor(v, 8, "0")
    fa = c10d.wait_tensor(a)
    b = c10d.all_gather_into_tensor(w, 8, "0")
    y = torch.relu(x @ fa)
    z = y @ y  # made of what is tied already: needs no tie of its own
    own = x @ x  # made of nothing that is tied
    return (z + own) @ c10d.wait_tensor(b)


def ties(program, *shapes):
    """What each tied node must run after."""
    with fake_group(8):
        inputs = [torch.ones(*shape) for shape in shapes]
        module = make_fx(program, tracing_mode="fake")(*inputs)
        count = pin_order(module.graph, FixedCost())
        module.graph.lint()
        found = {
            node.name: [str(dep) for dep in node.args[0]]
            for node in module.graph.nodes
            if node.op == "call_function" and pinned_target(node) is not node.target
        }
    assert count == len(found)
    return found, module


def test_launches_waits_and_the_compute_between_are_tied():
    found, _ = ties(prefetched, [16, 16], [2, 16], [2, 16])
    assert found == {
        "wait_tensor": ["all_gather_into_tensor"],
        "all_gather_into_tensor_1": ["wait_tensor"],
        "mm": ["all_gather_into_tensor_1"],
        "mm_2": ["all_gather_into_tensor_1"],
        "wait_tensor_1": ["mm", "mm_1", "mm_2", "all_gather_into_tensor_1"],
    }


def prefetched_after_a_bucket(x, u, v, w):
    fu, fv = c10d.all_gather_into_tensor_coalesced([u, v], 8, "0")
    fu, fv = c10d.wait_tensor(fu), c10d.wait_tensor(fv)
    b = c10d.all_gather_into_tensor(w, 8, "0")
    return (x @ fu @ fv) @ c10d.wait_tensor(b)


def test_a_launch_of_several_tensors_is_one_in_flight():
    found, _ = ties(prefetched_after_a_bucket, [16, 16], [2, 16], [2, 16], [2, 16])
    # Else the product could run in front of the launch that it is to hide.
    assert found["mm"] == ["all_gather_into_tensor"]


def exchanged(x, y):
    from dynamo_dist.tracing import operators  # noqa: F401  (defines the operators)

    torch.ops.dynamo_dist.wait_tensor(torch.ops.dynamo_dist.isend(x, 1, 0, "0", 1), 2)
    return c10d.wait_tensor(torch.ops.dynamo_dist.irecv(y, 1, 0, "0", 3))


def test_a_wait_that_nobody_reads_is_upstreams():
    """Of any other operator Inductor drops the value, and then what was to run after it runs
    before.
    """
    found, module = ties(exchanged, [4], [4])
    assert found["irecv"] == ["wait_tensor"]
    waits = [n for n in module.graph.nodes if n.name == "wait_tensor"]
    assert [pinned_target(n) for n in waits] == [c10d.wait_tensor.default]


@pytest.mark.parametrize(("program", "tied"), [(exchanged, True), (prefetched, False)])
def test_sends_are_tied_whoever_schedules(program, tied):
    shapes = [[4], [4]] if tied else [[16, 16], [2, 16], [2, 16]]
    with fake_group(8):
        module = make_fx(program, tracing_mode="fake")(*(torch.ones(*shape) for shape in shapes))
        Attachment(PassOptions(schedule="off")).after(module.graph, True)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert any(pinned_target(node) is not node.target for node in nodes) == tied


def test_numbers_stay():
    _, module = ties(prefetched, [16, 16], [2, 16], [2, 16])
    x, v, w = torch.randn(16, 16), torch.randn(2, 16), torch.randn(2, 16)
    with fake_group(8):
        torch.testing.assert_close(module(x, v, w), prefetched(x, v, w))


def reduced(x, y):
    fresh = c10d.wait_tensor(c10d.all_reduce(x @ y, "sum", "0"))
    read_again = x + y
    kept = c10d.wait_tensor(c10d.all_reduce(read_again, "sum", "0"))
    given = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
    viewed = c10d.wait_tensor(c10d.all_reduce((x * 2).view(-1), "sum", "0"))
    return fresh, kept, read_again, given, viewed


def test_a_reduction_overwrites_only_what_nobody_else_reads():
    _, module = ties(reduced, [4, 4], [4, 4])
    targets = [pinned_target(n) for n in module.graph.nodes if "all_reduce" in n.name]
    in_place, copied = c10d.all_reduce_.default, c10d.all_reduce.default
    assert [t for t in targets if t in (in_place, copied)] == [in_place, copied, copied, in_place]


def test_without_a_launch_nothing_is_touched():
    graph = trace(lambda x: (x @ x).relu() @ x, [4, 4])
    before = dump(graph)
    assert pin_order(graph, FixedCost()) == 0
    assert dump(graph) == before
