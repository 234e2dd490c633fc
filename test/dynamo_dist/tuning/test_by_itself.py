"""Who is left alone: jobs that asked for nothing, or whose ranks cannot meet; and what giving up leaves behind."""

import dataclasses
import types
import weakref

import pytest
import torch.distributed as dist

from dynamo_dist.tuning import by_itself, codes
from inductor_passes.agree import orders
from inductor_passes.agree.orders import Orders
from inductor_passes.attach import measured
from inductor_passes.torch_compat import c10d

SOURCE = """\
def call(args):
    x, = args
    buf0 = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '0')
    torch.ops._c10d_functional.wait_tensor.default(buf0)
    return (x, )
"""


class Ops:
    def __getattr__(self, name):
        return self

    def __call__(self, *args):
        return None


class Made(codes.Noted):
    """A graph whose record is at hand."""

    def __init__(self, module, record):
        super().__init__(weakref.ref(module), module.call, SOURCE, "abc")
        self.of = record

    def load(self):
        return self.of


@pytest.fixture
def job(monkeypatch):
    found = Orders(dist.HashStore(), 0, None)
    monkeypatch.setattr(orders, "current", lambda: found)
    monkeypatch.setattr(c10d, "world_size", lambda: 1)
    monkeypatch.setattr(c10d, "global_rank", lambda: 0)
    monkeypatch.setattr(by_itself, "is_enabled", lambda: True)
    measured.forget()
    yield found
    by_itself.give_up()
    by_itself._done.clear()
    measured.forget()


@pytest.fixture
def noted(graph):
    module = types.ModuleType("generated")
    module.torch = types.SimpleNamespace(ops=Ops())
    exec(compile(SOURCE, "generated.py", "exec"), module.__dict__)
    return Made(module, graph(graph="abc", place="here"))


def clocks_in(noted):
    return [name for name in noted.call.__globals__ if "clock" in name]


def test_nothing_is_touched_unless_costs_are_asked_for(job, noted):
    by_itself._noted(noted)
    assert not by_itself._running and not clocks_in(noted)


def test_ranks_that_cannot_meet_are_left_alone(job, noted, monkeypatch):
    monkeypatch.setenv(orders.SECONDS, "0")
    measured.times_of("here", "measured")
    by_itself._noted(noted)
    assert not by_itself._running and not clocks_in(noted)


def test_the_first_graph_that_nobody_measured_gives_the_beat_until_given_up(job, noted):
    measured.times_of("here", "measured")
    by_itself._noted(noted)
    (running,) = by_itself._running
    for _ in range(by_itself.WARM_UP - 1):
        assert noted.call((1,)) == (1,)
    assert running._beats == by_itself.WARM_UP - 1
    assert len(running._givers[0].calls) <= 1  # nothing piles up
    by_itself.give_up()
    assert not by_itself._running and not clocks_in(noted)
    assert by_itself.report().decision == "left"
    by_itself._noted(noted)  # once in a job
    assert not by_itself._running


def test_a_graph_that_is_measured_gives_no_beat(job, noted):
    noted.of = dataclasses.replace(noted.of, topology="x, measured")
    measured.times_of("here", "measured")
    by_itself._noted(noted)
    noted.call((1,))
    assert not clocks_in(noted)
    assert not by_itself._running[0]._givers
