"""Functions that Dynamo leaves to Python, in a job whose ranks have to know."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

import dynamo_dist
from inductor_passes.ranks import decision
from inductor_passes.testing import fake_group


class Job:
    """What one rank has left to Python."""

    def __init__(self):
        self.left = []

    def leave_to_python(self, code):
        self.left.append(code)

    def is_left_to_python(self, code):
        return code in self.left


@pytest.fixture
def job(monkeypatch):
    job = Job()
    monkeypatch.setattr(decision, "current", lambda: job)
    torch._dynamo.reset()
    with dynamo_dist.enabled(), contextlib.redirect_stdout(io.StringIO()):
        yield job


def turns(x, loud):
    for _ in range(2):
        x = x.sin()
        if loud:
            print("turn")
    return x


def calls_it(x, loud):
    return turns(x * 2, loud) * 3


class Graphs:
    """Operators of each graph, in order of compiling."""

    def __init__(self):
        self.found = []

    def __call__(self, gm, inputs):
        self.found.append(
            [
                node.target.__name__ if callable(node.target) else node.target
                for node in gm.graph.nodes
                if node.op.startswith("call")
            ]
        )
        return gm


def test_what_is_left_to_python_stays_there(job):
    graphs = Graphs()
    fast, x = torch.compile(calls_it, backend=graphs, dynamic=False), torch.ones(4)
    fast(x, True)
    assert job.left == [turns.__code__]
    apart = [["mul"], ["mul"]]
    assert graphs.found == apart
    assert torch.equal(fast(torch.ones(5), False), calls_it(torch.ones(5), False))
    torch._dynamo.reset()
    fast(x, False)
    assert graphs.found == apart * 3


def test_without_a_job_it_is_compiled_where_nothing_breaks(job, monkeypatch):
    monkeypatch.setattr(decision, "current", lambda: None)
    graphs = Graphs()
    fast = torch.compile(calls_it, backend=graphs, dynamic=False)
    fast(torch.ones(4), True)
    fast(torch.ones(5), False)
    assert graphs.found[-1] == ["mul", "sin", "sin", "mul"]


def test_where_no_break_is_allowed_it_is_inlined(job):
    torch.compile(calls_it, backend="eager")(torch.ones(4), True)
    assert job.left
    graphs = Graphs()
    torch.compile(calls_it, backend=graphs, fullgraph=True)(torch.ones(4), False)
    assert graphs.found == [["mul", "sin", "sin", "mul"]]


def test_a_collective_that_python_calls_is_no_graph_of_its_own(job):
    def gathered(x, loud):
        out = x.new_empty(2 * x.shape[0])
        for _ in range(2):
            dist.all_gather_into_tensor(out, x)
            if loud:
                print("turn")
        return out

    with fake_group(2):
        graphs = Graphs()
        torch.compile(gathered, backend=graphs)(torch.ones(4), loud=True)
    assert job.left and not any("all_gather" in name for graph in graphs.found for name in graph)


def test_context_manager_of_a_fallback_is_inlined_elsewhere(job):
    @contextlib.contextmanager
    def managed(x):
        yield x * 2

    def in_python(x):
        for _ in range(2):
            with managed(x) as y:
                print("turn")
                x = y + 1
        return x

    def in_a_graph(x):
        with managed(x) as y:
            return y.sin()

    torch.compile(in_python, backend="eager")(torch.ones(4))
    assert job.left == [in_python.__code__]
    graphs = Graphs()
    torch.compile(in_a_graph, backend=graphs)(torch.ones(4))
    assert graphs.found == [["mul", "sin"]]
