"""What is refused, and in which words."""

import pytest
import torch
import torch.distributed as dist


def read(x):
    work = dist.all_reduce(x, async_op=True)
    y = x * 2
    work.wait()
    return y


def write(x):
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()
    return x


def read_a_view_of_the_buffer(x):
    whole = torch.zeros(64, 4)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    row = whole[3:5]
    y = row + 1
    work.wait()
    return y


@pytest.mark.parametrize("function", [read, write, read_a_view_of_the_buffer])
def test_a_buffer_in_flight_may_not_be_used(function, mesh, enabled):
    first = function.__code__.co_firstlineno
    lines = {read: (1, 2), write: (1, 2), read_a_view_of_the_buffer: (2, 4)}[function]
    launch, use = (f"test_refusals.py:{first + line} in {function.__name__}" for line in lines)
    with pytest.raises(Exception, match="in flight") as caught:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(8, 4))
    message = str(caught.value)
    assert f"{use} uses a buffer" in message
    assert "launched at " in message and launch in message
    assert "Call .wait() on the Work first." in message


def test_objects_break_the_graph_with_a_fix(mesh, enabled):
    def program(x):
        objects = [None] * 8
        dist.all_gather_object(objects, 1)
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(3))
    assert caught.value.gb_type == "Collective on Python objects"
    assert "pass the objects in" in str(caught.value)


def test_recv_from_anyone_breaks_as_it_returns_the_sender(mesh, enabled):
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(lambda x: dist.recv(x), backend="eager", fullgraph=True)(torch.ones(3))
    assert caught.value.gb_type == "Receive from any rank that returns the sender"


def test_an_eager_work_after_a_launch_breaks_rather_than_hangs(mesh, enabled):
    def program(work, x):
        dist.isend(x, 1).wait()
        work.wait()
        return x + 1

    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(program, backend="eager", fullgraph=True)(work, torch.ones(3))
    assert caught.value.gb_type == (
        "Wait for a Work of an earlier launch after a launch in the graph"
    )
