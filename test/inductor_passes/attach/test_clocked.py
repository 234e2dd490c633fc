"""Clocks in generated code: around every event, without another result, and gone again."""

import itertools
import types

import pytest
import torch

from inductor_passes.attach.clocked import clocked
from inductor_passes.attach.generated_code import read_order
from inductor_passes.testing import fake_group

SOURCE = """
import torch
extern_kernels = torch
WAITED = []

class Runner:
    def call(self, args):
        a, b = args
        args.clear()
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(a, 2, '0')
        with torch.no_grad():
            buf1 = torch.empty(4, 4)
            extern_kernels.mm(b, b, out=buf1)
        torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        buf2 = buf1; del buf1  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        return (buf0, buf2, )

runner = Runner()
call = runner.call
"""


@pytest.fixture
def module():
    made = types.ModuleType("generated")
    exec(compile(SOURCE, "generated.py", "exec"), made.__dict__)
    return made


@pytest.fixture(autouse=True)
def group():
    with fake_group(2):
        yield


def run(module):
    return module.call([torch.ones(2, 2), torch.ones(4, 4)])


@pytest.mark.parametrize("way", ["alone", "scheduled"])
def test_every_event_is_timed_and_the_result_is_the_same(module, way):
    clocks = clocked(module.call, SOURCE)
    wanted = run(module)
    clocks.start(way)
    found = run(module), run(module)
    calls = clocks.stop()
    assert clocks.events == tuple(read_order(SOURCE))
    assert clocks.events == ("launch all_gather", "kernel", "launch all_reduce", "wait 0", "wait 1")
    assert [len(marks) for marks in calls] == [2 + 2 * len(clocks.events)] * 2
    assert all(a <= b for marks in calls for a, b in itertools.pairwise(marks))
    for result in found:
        assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


def test_the_code_comes_back_and_nothing_is_left(module):
    before, names = module.call.__func__.__code__, set(vars(module))
    clocks = clocked(module.call, SOURCE)
    clocks.start("alone")
    assert module.call.__func__.__code__ is not before
    clocks.start("scheduled")
    clocks.stop()
    assert module.call.__func__.__code__ is before
    assert set(vars(module)) == names
    run(module)
    assert clocks.stop() == []


def test_alone_waits_for_each_launch_at_once(module, monkeypatch):
    seen = []
    monkeypatch.setattr("inductor_passes.attach.clocked._wait", lambda *v: seen.append(len(v)))
    clocks = clocked(module.call, SOURCE)
    clocks.start("scheduled")
    run(module)
    assert seen == []
    clocks.start("alone")
    run(module)
    clocks.stop()
    assert seen == [1, 1]


def test_a_call_that_raises_leaves_no_times(module):
    clocks = clocked(module.call, SOURCE)
    clocks.start("scheduled")
    with pytest.raises(RuntimeError):
        module.call([torch.ones(2, 2), torch.ones(4, 3)])
    assert clocks.stop() == []


def test_other_code_is_not_clocked(module):
    assert clocked(lambda args: args, SOURCE) is None
    assert clocked(torch.relu, SOURCE) is None
    assert clocked(module.call, SOURCE.replace("_c10d_functional", "other")) is None
    assert clocked(module.call, "def call(:") is None
