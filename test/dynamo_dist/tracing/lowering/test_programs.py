"""Programs on a fake group: compiled in one graph they give what eager gives."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils._pytree import tree_leaves

PROGRAMS = {}
PREMUL = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Holder:
    """Carries a Work in an attribute."""


@program
def work_in_an_attribute(x):
    holder = Holder()
    holder.work = dist.all_reduce(x, async_op=True)
    other = x.new_ones(3)
    holder.work.wait()
    return x + 1, other


HELD = Holder()


@program
def work_in_an_attribute_that_stays(x):
    HELD.work = dist.all_reduce(x, async_op=True)
    HELD.work.wait()
    return x + 1


@program
def work_in_a_condition(x):
    work = dist.all_reduce(x, async_op=True)
    if work is not None and work and isinstance(work, dist.Work):
        work.wait()
    return x * 2


@program
def works_in_a_dict(x):
    y = x + 1
    works = {"x": dist.all_reduce(x, async_op=True), "y": dist.all_reduce(y, async_op=True)}
    for work in works.values():
        work.wait()
    return x + y


@program
def disjoint_parts_of_one_buffer(x):
    works = [dist.all_reduce(rows, async_op=True) for rows in x[:, :2].chunk(4)]
    right = x[:, 2:] * 2
    for work in works:
        work.wait()
    return x.sum() + right


@program
def views_before_the_wait(x):
    whole = torch.zeros(64, 4)
    work = dist.all_gather_into_tensor(whole, x.detach(), async_op=True)
    row, shape = whole.view(8, 8, 4)[3], whole.shape
    work.wait()
    return row + 1, shape[0]


@program
def future(x):
    dist.all_reduce(x, async_op=True).get_future().wait()
    return x * 2


@program
def callback(x):
    work = dist.all_reduce(x, async_op=True)
    return work.get_future().then(lambda future: x * 3).wait()


@program
def wait_tensor_of_a_buffer_in_flight(x):
    dist.all_reduce(x, async_op=True)
    funcol.wait_tensor(x)
    return x * 2


@program
def work_that_leaves(x):
    y = x * 2
    return y, dist.all_reduce(y, async_op=True)


@program
def barriers(x):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    return x * 2


@program
def no_member(x):
    outside = dist.GroupMember.NON_GROUP_MEMBER
    results = [
        dist.all_reduce(x, group=outside),
        dist.all_reduce(x, group=outside, async_op=True),
        dist.recv(x, 4, group=outside),
        dist.barrier(group=outside),
    ]
    return x + 1, results


@program
def ranks_of_the_group(x):
    dist.broadcast(x, group_src=1)
    dist.reduce(x, group_dst=0)
    return x + 1


@program
def ring(x):
    got = torch.zeros_like(x)
    for work in [dist.isend(x, 1), dist.irecv(got, 7)]:
        work.wait()
    return got + x


@program
def recv_tells_the_sender(x):
    return dist.recv(x, 3), x * 2


@program
def batches(x):
    buffers = [torch.zeros_like(x) for _ in range(2)]
    ops = []
    for peer, buffer in enumerate(buffers, 1):
        ops += [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, buffer, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return buffers


@program
def stacked(x):
    whole = torch.zeros(8, 8, 4)
    dist.all_gather_into_tensor(whole, x.detach())
    return whole.shape


@program
def coalesced_list(x):
    y = x + 1
    dist.all_reduce_coalesced([x, y])
    dist.all_reduce_coalesced([x, y], async_op=True).wait()
    return x + y


@program
def reduce_ops(x):
    dist.all_reduce(x, group=dist.group.WORLD, op=dist.ReduceOp.MAX)
    dist.all_reduce(x, op=PREMUL)
    dist.all_reduce(x, dist.reduce_op.SUM)
    return x


@program
def partially_applied(x):
    functools.partial(dist.all_reduce, group=dist.group.WORLD)(x)
    return x


@program
def c10d_has_no_gradient(x):
    y = x * 2
    dist.all_reduce(y)
    return y


class ReduceBothWays(torch.autograd.Function):
    """Its forward and its backward write to what they return."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@program
def autograd_function_that_writes_to_its_result(x):
    return ReduceBothWays.apply(x) * 2


def run(function, needs_grad):
    torch.manual_seed(0)
    leaf = torch.randn(8, 4, requires_grad=needs_grad)
    x = leaf * 1.0
    leaves = tree_leaves(function(x))
    for leaf_value in leaves:
        if isinstance(leaf_value, dist.Work):
            leaf_value.wait()
    tensors = [leaf_value for leaf_value in leaves if isinstance(leaf_value, torch.Tensor)]
    if total := [tensor.sum() for tensor in tensors if tensor.requires_grad]:
        sum(total).backward()
    plain = [leaf_value for leaf_value in leaves if not isinstance(leaf_value, torch.Tensor)]
    kinds = [isinstance(value, dist.Work) or value for value in plain]
    flags = [tensor.requires_grad for tensor in tensors]
    return [t.detach().clone() for t in [*tensors, x]], leaf.grad, kinds, flags


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name, needs_grad, mesh, enabled):
    function = PROGRAMS[name]
    eager = run(function, needs_grad)
    compiled = run(torch.compile(function, backend="aot_eager", fullgraph=True), needs_grad)
    torch.testing.assert_close(compiled[0], eager[0])
    torch.testing.assert_close(compiled[1], eager[1])
    assert compiled[2:] == eager[2:]


def test_a_work_from_outside_is_waited_for(mesh, enabled):
    class Counting(dist.Work):
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            return True

    def waiting(work, x):
        work.wait()
        return x * 2

    compiled = torch.compile(waiting, backend="aot_eager", fullgraph=True)
    works = [Counting(), Counting()]
    for work in works:
        compiled(work, torch.ones(3))
    assert [work.waits for work in works] == [1, 1]


def test_a_work_leaves_a_graph_that_is_not_the_whole_function(mesh, enabled):
    """Dynamo then looks at every frame that runs until the function returns, those of the Work
    too.
    """

    def launches(x, breaks):
        x = x.clone()
        work = dist.all_reduce(x, async_op=True)
        if breaks:
            torch._dynamo.graph_break()
            work.wait()
        return x, work

    compiled = torch.compile(launches, backend="aot_eager")
    for breaks in (False, True):
        x, work = compiled(torch.ones(3), breaks)
        assert work.wait()
        torch.testing.assert_close(x, torch.ones(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.mul_(2) + 1,
        lambda a: (a.view(2, 2).add_(1), a[1:].zero_(), a.sin())[2],
        lambda a: a.copy_(torch.ones(4)) * a.mul_(a + 1),
    ],
    ids=["itself", "views", "twice"],
)
def test_writes_to_a_tensor_in_flight_reach_it(write, mesh, enabled):
    ends = []
    for function in (write, torch.compile(write, backend="aot_eager", fullgraph=True)):
        in_flight = funcol.all_reduce(torch.arange(4.0), "sum", dist.group.WORLD)
        ends.append((function(in_flight) + 0, in_flight.wait()))
    torch.testing.assert_close(ends[1], ends[0])


def test_another_reduce_op_is_another_graph(mesh, enabled, compiled):
    function, graphs = compiled(lambda x, op: dist.all_reduce(x, op))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        function(torch.ones(3), op)
    assert len(graphs) == 2


def test_the_text_of_a_reduce_op(mesh, enabled, compiled):
    function, graphs = compiled(lambda x, op: (x + 1, str(op)))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        assert function(torch.ones(3), op)[1] == str(op)
    assert len(graphs) == 2
